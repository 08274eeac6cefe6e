// A page in headless Chromium whose errors, messages and requests to elsewhere are kept.

import {chromium} from 'playwright-core';

// request: {chromium, address, width, dark}; `seen` gets `errors`, `console` and `foreign`.
export async function openWatched(request, height) {
  const seen = {errors: [], console: [], foreign: []};
  const browser = await chromium.launch({
    executablePath: request.chromium,
    args: ['--no-sandbox', '--disable-gpu', '--disable-background-networking',
      '--disable-component-update', '--disable-sync', '--disable-default-apps', '--no-first-run'],
  });
  const page = await browser.newPage({
    viewport: {width: request.width, height},
    colorScheme: request.dark ? 'dark' : 'light',
  });
  page.setDefaultTimeout(60000);
  page.on('pageerror', (error) => seen.errors.push(String(error)));
  page.on('console', (message) => {
    if (message.type() !== 'log') seen.console.push(message.text());
  });
  page.on('request', (of) => {
    if (new URL(of.url()).origin !== new URL(request.address).origin) seen.foreign.push(of.url());
  });
  return {browser, page, seen};
}
