// Opens the page of `instr weights --view` in headless Chromium, does `steps`, and reports what it shows.
//
// Request: {chromium, address, width, dark, steps, picture}.
// A step is [what, ...]: ["tensor", name], ["go", row, column] (either may be ""), ["zoom", n] (turns
// of the wheel at the middle of the first pane), ["measure", name], ["figure", name], ["whole"],
// ["hover", x, y] (shares of the first pane), ["channel", n], ["keys", ...keys].

import {openWatched} from './watched.mjs';

export default async function (request) {
  const {page, seen} = await openWatched(request, 1000);
  Object.assign(seen, {steps: []});
  try {
    const canvas = page.locator('.weights .panes canvas').first();
    const quiet = async () => {
      // what was done is seen before the next frame but one
      await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
      await page.waitForFunction(() => !document.querySelector('.weights [aria-busy=true]'));
    };
    const doing = {
      tensor: (name) => page.locator(`.weights .map button[title^=${JSON.stringify(name + ':')}]`).click(),
      go: async (row, column) => {
        await page.fill('.weights .row', String(row));
        await page.fill('.weights .column', String(column));
        await page.click('.weights .go button');
      },
      zoom: async (turns) => {
        await canvas.hover();
        for (let i = 0; i < Math.abs(turns); i++) await page.mouse.wheel(0, turns > 0 ? -240 : 240);
      },
      measure: (name) => page.selectOption('.weights .measure', name),
      figure: (name) => page.selectOption('.weights .figure', name),
      whole: () => page.click('.weights .whole'),
      hover: async (x, y) => {
        const box = await canvas.boundingBox();
        await page.mouse.move(box.x + x * box.width, box.y + y * box.height);
      },
      channel: (n) => page.locator('.weights .channels button').nth(n).click(),
      keys: async (...keys) => {
        await canvas.focus();
        for (const key of keys) await page.keyboard.press(key);
      },
    };
    const look = async () => page.evaluate(() => {
      const text = (selector) => document.querySelector(`.weights ${selector}`)?.textContent ?? '';
      const texts = (selector) => [...document.querySelectorAll(`.weights ${selector}`)].map((of) => of.textContent);
      return {
        name: text('.name'), facts: text('.facts'), troubles: text('.troubles'), level: text('.level'),
        where: text('.cell .where'), cell: text('.cell'),
        values: Object.fromEntries([...document.querySelectorAll('.weights .cell b')].map((of) => [of.dataset.which, of.textContent])),
        near: [...document.querySelectorAll('.weights .near tr')].map((row) => [...row.cells].map((of) => of.textContent)),
        captions: texts('figcaption'), panes: document.querySelectorAll('.weights .panes canvas').length,
        numbers: Object.fromEntries([...document.querySelectorAll('.weights .numbers td')].map((of) => [of.dataset.figure, of.textContent])),
        channels: texts('.channels button'), charts: document.querySelectorAll('.weights .vectors .uplot').length,
        legends: texts('.panes .legend .most'), range: text('.range'), state: text('.state'),
        // how many colours each pane has
        drawn: [...document.querySelectorAll('.weights .panes canvas')].map((of) => {
          const copy = document.createElement('canvas');
          Object.assign(copy, {width: of.width, height: of.height});
          const context = copy.getContext('2d', {willReadFrequently: true});
          context.drawImage(of, 0, 0);
          const {data} = context.getImageData(0, 0, of.width, of.height);
          return new Set(new Uint32Array(data.buffer)).size;
        }),
      };
    });
    await page.goto(request.address);
    await page.waitForFunction(() => /^\d+ tensor/.test(document.querySelector('.weights .state')?.textContent));
    await quiet();
    for (const [what, ...of] of request.steps) {
      await doing[what](...of);
      await quiet();
      seen.steps.push(await look());
    }
    if (!request.steps.length) seen.steps.push(await look());
    seen.overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    seen.buttons = await page.locator('.weights .map button').evaluateAll((all) => all.map((of) => of.title));
    if (request.picture) await page.screenshot({path: request.picture, fullPage: request.whole ?? true});
  } finally {
    await page.context().close();
  }
  return seen;
}
