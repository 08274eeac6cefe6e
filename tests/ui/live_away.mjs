// Takes the page of `instr live` away from its server for a while, and reports what it then says.
//
// Standard input: {chromium, address, away}; standard output: {before, lost}, the first line of the
// page. It gets five frames. When the server has sent `away` more, its connection breaks.

import fs from 'node:fs';
import {launch} from './watched.mjs';

const request = JSON.parse(fs.readFileSync(0, 'utf8'));
const browser = await launch(request.chromium);
try {
  const page = await browser.newPage();
  page.setDefaultTimeout(180000);
  let connections = 0;
  await page.routeWebSocket(/\/frames/, (socket) => {
    const server = socket.connectToServer();
    if (connections++) return;
    let frames = 0;
    server.onMessage((message) => {
      frames++;
      if (frames <= 5) socket.send(message);
      if (frames === 5 + request.away) socket.close();
    });
  });
  await page.goto(request.address);
  const state = page.locator('#state');
  await page.waitForFunction(() => document.getElementById('state').textContent.startsWith('Recording'));
  const before = await state.textContent();
  await page.waitForFunction(
    () => document.getElementById('state').textContent.includes('not shown'));
  process.stdout.write(JSON.stringify({before, lost: await state.textContent()}));
} finally {
  await browser.close();
}
