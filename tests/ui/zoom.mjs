// Zooms on the page of `instr weights --view`, and returns milliseconds by what they are: `between
// frames` of the browser, and `to draw` a frame.
// Request: {chromium, address}.

import {launch} from './watched.mjs';

export default async function (request) {
  const browser = await launch(request.chromium);
  const page = await browser.newPage({viewport: {width: 1600, height: 1000}});
  await page.goto(request.address);
  const canvas = page.locator('.weights .panes canvas').first();
  await canvas.waitFor();
  await page.waitForLoadState('networkidle');
  const times = await page.evaluate(async () => {
    const canvas = document.querySelector('.weights .panes canvas');
    const box = canvas.getBoundingClientRect();
    const wheel = (deltaY) => canvas.dispatchEvent(new WheelEvent('wheel', {
      deltaY, clientX: box.left + box.width / 3, clientY: box.top + box.height / 3, cancelable: true}));
    const next = () => new Promise(requestAnimationFrame);
    const between = [], drawing = [];
    // four seconds in and four out, at sixty frames a second: 0.04 to 64 pixels for a weight
    for (const turn of [-16, 16]) {
      let before = await next();
      for (let i = 0; i < 240; i++) {
        wheel(turn);
        const asked = performance.now();
        const now = await next();  // called after the page's own drawing, which was asked for before
        drawing.push(performance.now() - Math.max(asked, now));
        between.push(now - before);
        before = now;
      }
    }
    return {'between frames': between, 'to draw': drawing};
  });
  await page.context().close();
  return times;
}
