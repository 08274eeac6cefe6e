// Takes the page of `instr live` away from its server for a while, and reports what it then says.
//
// Request: {chromium, address, away}. Returns {before, lost}, the first line of the page. It gets five
// frames. When the server has sent `away` more, its connection breaks.

import {launch} from './watched.mjs';

export default async function (request) {
  const browser = await launch(request.chromium);
  const page = await browser.newPage();
  try {
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
    return {before, lost: await state.textContent()};
  } finally {
    await page.context().close();
  }
}
