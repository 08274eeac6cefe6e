// Opens TensorBoard's profiler plugin and shows its views one after the other. The plugin draws its
// charts with a library of Google's, which it loads from the internet; here that library draws
// nothing. The trace viewer's polyfill comes from npm. The rest is TensorBoard's own.
// Request: {chromium, address, pictures}. Returns {views: {name: text}, errors}.

import {readFileSync} from 'node:fs';
import {launch} from './watched.mjs';

const NO_CHARTS = `
  const nothing = new Proxy(function () {}, {get: (_, name) => name === 'then' ? undefined : nothing,
    apply: () => nothing, construct: () => nothing});
  window.google = {charts: {load: (_, options) => options?.callback?.(),
    setOnLoadCallback: (callback) => callback()}, visualization: nothing};
`;

export default async function (request) {
  const browser = await launch(request.chromium);
  const page = await browser.newPage({viewport: {width: 1400, height: 800}});
  page.setDefaultTimeout(60000);
  const errors = [];
  page.on('pageerror', (error) => errors.push(String(error)));
  const polyfill = new URL('node_modules/webcomponents.js/webcomponents.min.js', import.meta.url);
  await page.route((url) => url.origin !== new URL(request.address).origin, (asked) => {
    const url = asked.request().url();
    const body = url.includes('gstatic.com/charts') ? NO_CHARTS
      : url.includes('webcomponents.min.js') ? readFileSync(polyfill, 'utf8') : null;
    return body ? asked.fulfill({contentType: 'text/javascript', body}) : asked.abort();
  });
  await page.goto(`${request.address}/#pytorch_profiler`);
  const frame = page.frameLocator('iframe');
  const views = {};
  const wanted = {
    Overview: 'Execution Summary', Operator: 'Host Self Duration', Kernel: 'Kernel View',
    Trace: '', Memory: 'Memory View',
  };
  for (const [name, text] of Object.entries(wanted)) {
    await frame.locator('[role=button][aria-haspopup=listbox]').nth(1).click();
    await frame.locator('[role=option]', {hasText: name}).click();
    if (text) {
      await frame.getByText(text, {exact: false}).first().waitFor();
      await page.waitForTimeout(1000);
      views[name] = await frame.locator('body').innerText();
    } else {
      // the trace viewer is a page of its own inside
      const trace = frame.frameLocator('iframe');
      await trace.getByText('llama.cpp (pid').filter({visible: true}).first().waitFor();
      await page.waitForTimeout(1000);
      views[name] = await trace.locator('body').innerText();
    }
    if (request.pictures) await page.screenshot({path: `${request.pictures}/${name}.png`});
  }
  await page.goto(`${request.address}/?again#scalars`);
  const scalar = page.getByText('memory in bytes/weights').first();
  await scalar.waitFor();
  views.Scalars = await scalar.innerText();
  await page.waitForTimeout(2000);
  if (request.pictures) await page.screenshot({path: `${request.pictures}/Scalars.png`});
  await page.context().close();
  return {views, errors};
}
