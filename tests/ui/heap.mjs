// Opens the page of `instr live` and prints the bytes of its heap every ten seconds, after a garbage
// collection, until standard input ends. Standard input: one line, {chromium, address}.

import readline from 'node:readline';
import {launch} from './watched.mjs';

const lines = readline.createInterface({input: process.stdin});
const first = await new Promise((resolve) => lines.once('line', resolve));
const request = JSON.parse(first);
const browser = await launch(request.chromium);
const page = await browser.newPage({viewport: {width: 1280, height: 900}});
const session = await page.context().newCDPSession(page);
await page.goto(request.address);
const timer = setInterval(async () => {
  await session.send('HeapProfiler.collectGarbage');
  const {usedSize} = await session.send('Runtime.getHeapUsage');
  process.stdout.write(`${usedSize}\n`);
}, 10000);
lines.once('close', async () => {
  clearInterval(timer);
  await browser.close();
});
