// Opens the page of `instr live` and returns [time in ms, number of tokens] for each change of it.
// Request: {chromium, address, seconds}.

import {launch} from './watched.mjs';

export default async function (request) {
  const browser = await launch(request.chromium);
  const page = await browser.newPage({viewport: {width: 1280, height: 900}});
  await page.goto(request.address);
  const changes = await page.evaluate((seconds) => new Promise((done) => {
    const seen = [];
    const state = document.getElementById('state');
    new MutationObserver(() => {
      const found = /([\d,]+) tokens/.exec(state.textContent);
      if (found) seen.push([performance.timeOrigin + performance.now(), Number(found[1].replaceAll(',', ''))]);
    }).observe(state, {childList: true, characterData: true, subtree: true});
    setTimeout(() => done(seen), 1000 * seconds);
  }), request.seconds);
  await page.context().close();
  return changes;
}
