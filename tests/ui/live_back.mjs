// Looks back in time on the page of `instr live` while the session goes on.
//
// Request: {chromium, address, width, dark, steps, open, pictures, picture}. Once there are `steps` steps, it pauses, drags the strip of steps, chooses a range on a
// chart, opens it if `open`, and goes on. `pictures` is a prefix of file names. With `picture` it takes
// only that.

import {launch, watch} from './watched.mjs';

export default async function (request) {
  const seen = {errors: [], console: []};
  const browser = await launch(request.chromium);
  const picture = async (page, name) => {
    if (request.pictures) await page.screenshot({path: `${request.pictures}${name}.png`, fullPage: true});
  };
  const context = await browser.newContext({
    viewport: {width: request.width, height: 900}, colorScheme: request.dark ? 'dark' : 'light',
    acceptDownloads: true,
  });
  try {
    const page = await context.newPage();
    page.setDefaultTimeout(180000);
    watch(page, seen);
    await page.goto(request.address);
    const tokens = () => page.evaluate(
      () => Number((/([\d,]+) tokens/.exec(document.getElementById('state').textContent)?.[1] ?? '0').replaceAll(',', '')));
    const texts = () => page.evaluate(() => Object.fromEntries(
      ['state', 'rate', 'steps-note', 'shown-time', 'pause', 'chosen-range', 'lanes'].map(
        (id) => [id, document.getElementById(id).textContent])));
    await page.waitForFunction((least) => Number(
      (/([\d,]+) steps/.exec(document.getElementById('state').textContent)?.[1] ?? '0').replaceAll(',', '')) > least,
    request.steps);
    if (request.picture) {
      await page.waitForTimeout(3000);
      await page.screenshot({path: request.picture});
      return seen;
    }
    await picture(page, 'live');

    await page.click('#pause');
    seen.paused = await texts();
    const before = await tokens();
    await page.waitForFunction((n) => Number(
      /([\d,]+) tokens/.exec(document.getElementById('state').textContent)[1].replaceAll(',', '')) > n, before);
    seen.later = await texts();

    const strip = page.locator('#steps');
    await strip.scrollIntoViewIfNeeded();
    const box = await strip.boundingBox();
    const y = box.y + box.height / 2;
    await page.mouse.move(box.x + 100, y);
    await page.mouse.down();
    await page.mouse.move(box.x + 150, y);
    await page.mouse.move(box.x + 220, y);
    await page.mouse.up();
    seen.dragged = await texts();
    await strip.focus();
    await page.keyboard.press('ArrowLeft');
    await page.locator('#step table').waitFor();
    seen.step = await page.locator('#step p').textContent();
    await page.keyboard.press('ArrowLeft');
    await page.waitForFunction((was) => document.querySelector('#step p').textContent !== was, seen.step);
    seen.before = await page.locator('#step p').textContent();
    await picture(page, 'back');

    await page.selectOption('#span', '60');
    const chart = page.locator('#chart-rate .u-over');
    await chart.scrollIntoViewIfNeeded();
    const over = await chart.boundingBox();
    await page.mouse.move(over.x + over.width * 0.3, over.y + 40);
    await page.mouse.down();
    await page.mouse.move(over.x + over.width * 0.97, over.y + 40, {steps: 5});
    await page.mouse.move(over.x + over.width * 0.995, over.y + 40, {steps: 3});
    await page.mouse.up();
    seen.chosen = await texts();
    seen.href = await page.getAttribute('#open', 'href');
    await picture(page, 'chosen');
    if (request.open) {
      const [tab] = await Promise.all([context.waitForEvent('page'), page.click('#open')]);
      const download = tab.waitForEvent('download').then((of) => of.suggestedFilename(), () => null);
      const shown = tab.waitForFunction(() => document.title.includes('Perfetto') || document.title.includes('pftrace'), null, {timeout: 180000})
        .then(() => tab.url(), () => null);
      seen.opened = await Promise.race([download, shown]);
      if (request.pictures) {
        await tab.waitForTimeout(3000);
        await picture(tab, 'perfetto');
      }
      await tab.close();
    }
    await page.click('#pause');
    seen.resumed = await texts();
  } finally {
    await context.close();
  }
  return seen;
}
