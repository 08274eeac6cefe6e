// Runs scripts of this folder, one after the other, so that node, playwright and Chromium start once.
//
// A line of standard input is {script, request}; a line of standard output is {seen}, what the script's
// function returned, or {error}.

import readline from 'node:readline';
import {closeBrowsers} from './watched.mjs';

for await (const line of readline.createInterface({input: process.stdin})) {
  const {script, request} = JSON.parse(line);
  let answer;
  try {
    const {default: run} = await import(`./${script}`);
    answer = {seen: await run(request) ?? null};
  } catch (error) {
    answer = {error: error.stack};
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
await closeBrowsers();
