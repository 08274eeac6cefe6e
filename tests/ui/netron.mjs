// Opens the page of Netron, which shows a graph, and counts what it shows. Requests to elsewhere are
// refused: Netron asks where the reader is, and reports its use.
// Request: {chromium, address, picture}. Returns {operators, title}.

import {launch} from './watched.mjs';

export default async function (request) {
  const browser = await launch(request.chromium);
  const page = await browser.newPage({viewport: {width: 1280, height: 900}});
  page.setDefaultTimeout(120000);
  await page.route((url) => url.origin !== new URL(request.address).origin, (asked) => asked.abort());
  await page.goto(request.address);
  await page.getByText('Accept').click();
  // the page forbids eval, so only locators work
  await page.locator('body.default').waitFor();
  const operators = await page.locator('#canvas .node-item').count();
  const title = await page.title();
  if (request.picture) await page.screenshot({path: request.picture});
  await page.context().close();
  return {operators, title};
}
