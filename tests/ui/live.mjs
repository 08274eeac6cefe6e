// Opens the page of `instr live` in headless Chromium and reports what it shows at the end.
//
// Request: {chromium, address, width, dark, click, picture}.
// It waits until the page says that the session has ended.

import {openWatched} from './watched.mjs';

export default async function (request) {
  const {page, seen} = await openWatched(request, 900);
  try {
    await page.goto(request.address);
    await page.waitForFunction(
      () => document.getElementById('state').textContent.startsWith('The session has ended'));
    // it draws before the next picture
    await page.evaluate(() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn))));
    if (request.click) {
      const steps = page.locator('#steps');
      await steps.scrollIntoViewIfNeeded();
      const box = await steps.boundingBox();
      await steps.click({position: {x: box.width - 2, y: box.height / 2}});
      await page.locator('#step table').waitFor();
    }
    seen.state = await page.textContent('#state');
    seen.figures = await page.evaluate(() => Object.fromEntries(
      [...document.querySelectorAll('.figures b')].map((of) => [of.id, of.textContent])));
    seen.lanes = await page.evaluate(() => [...document.querySelectorAll('.lane')].map((of) => ({
      name: of.querySelector('b').textContent, facts: of.querySelector('.facts').innerText,
      text: of.querySelector('.text').textContent})));
    seen.kernels = await page.evaluate(() => document.querySelectorAll('#step td:first-child').length);
    seen.messages = await page.locator('#messages li').allTextContents();
    seen.overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    if (request.picture) await page.screenshot({path: request.picture, fullPage: true});
  } finally {
    await page.context().close();
  }
  return seen;
}
