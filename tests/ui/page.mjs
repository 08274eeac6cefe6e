// Opens one of our HTML reports in headless Chromium and reports its behaviour.
//
// All requests except for the page itself are listed and blocked.

import {pathToFileURL} from 'node:url';
import {launch, listen, watch} from './watched.mjs';

// Request: chromium, file, width, height, dark, sorts [[table's number, column's name, how]] where
// how is "click" or a key, icicle [what to do with its boxes], picture (a PNG to write) and whole
// (the whole page, not the screen). Of an icicle, "click NAME" clicks on the first box or button of
// that name, other words are keys. measure is a selector of elements whose place is wanted.
export default async function (request) {
  const address = pathToFileURL(request.file).href;
  const seen = {sorted: [], foreign: [], errors: [], console: [], overflow: 0, texts: [],
    boxes: [], ink: '', measured: []};

  const {proxy, server} = await listen(seen);

  let page;
  try {
    const browser = await launch(request.chromium, {proxy: {server: 'http://browsers-own.invalid'}});
    page = await browser.newPage({
      viewport: {width: request.width, height: request.height},
      colorScheme: request.dark ? 'dark' : 'light',
      proxy: {server},
    });
    page.setDefaultTimeout(120000);
    watch(page, seen);
    // the policy blocks requests before they are sent; others reach the proxy as well
    page.on('response', (answer) => {
      const url = answer.url();
      if (url !== address && !url.startsWith('data:')) seen.foreign.push(url);
    });
    await page.goto(address);
    for (const [number, column, how] of request.sorts) {
      const table = page.locator('table').nth(number);
      const button = table.getByRole('columnheader', {name: column, exact: true})
          .getByRole('button');
      if (how === 'click') await button.click();
      else await button.press(how);
      seen.sorted.push(await table.evaluate((table) => ({
        order: [...table.tHead.rows[0].cells].map((head) => head.getAttribute('aria-sort')),
        rows: [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.innerText)),
      })));
    }
    for (const what of request.icicle) {
      const icicle = page.locator('.icicle').first();
      if (what.startsWith('click ')) {
        await icicle.getByRole('button', {name: what.slice(6), exact: true}).first().click();
      } else if (what) {
        await page.keyboard.press(what);
      }
      seen.boxes.push(await icicle.evaluate((icicle) => ({
        caption: icicle.querySelector('.caption').textContent,
        focus: document.activeElement.title,
        boxes: [...icicle.querySelectorAll('.boxes button')].map((box) => {
          const {left, width, top} = box.getBoundingClientRect();
          const within = icicle.querySelector('.boxes').getBoundingClientRect();
          return [box.title.split(':')[0], (left - within.left) / within.width,
            width / within.width, Math.round(top - within.top)];
        }),
      })));
    }
    if (request.measure) {
      seen.measured = await page.locator(request.measure).evaluateAll((found) => found.map((of) => {
        const {left, right} = of.getBoundingClientRect();
        return [of.textContent, left, right];
      }));
    }
    seen.ink = await page.evaluate(() => getComputedStyle(document.body).color);
    seen.overflow = await page.evaluate(
        () => document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth);
    seen.texts = await page.locator('svg text').allTextContents();
    if (request.picture) {
      await page.screenshot({path: request.picture, fullPage: Boolean(request.whole)});
    }
  } finally {
    await page?.context().close();
    proxy.close();
  }
  return seen;
}
