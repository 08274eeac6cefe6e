// Opens the page of `instr live` and prints [time in ms, number of tokens] for each change of it.
// Standard input: {chromium, address, seconds}.

import fs from 'node:fs';
import {launch} from './watched.mjs';

const request = JSON.parse(fs.readFileSync(0, 'utf8'));
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
await browser.close();
process.stdout.write(JSON.stringify(changes));
