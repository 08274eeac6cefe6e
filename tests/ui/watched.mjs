// Headless Chromium, and pages of it whose errors, messages and requests to elsewhere are kept.

import http from 'node:http';
import {chromium} from 'playwright-core';

const running = new Map();

/** Chromium without the services of its own that ask for addresses; `more` are playwright's options. All
 * that ask for the same get the same one, so they close only their pages. */
export async function launch(executablePath, {args = [], ...more} = {}) {
  const key = JSON.stringify([executablePath, args, more]);
  if (!running.get(key)?.isConnected()) {
    running.set(key, await chromium.launch({
      executablePath, ...more,
      // containers lack the rights for the sandbox
      args: ['--no-sandbox', '--disable-gpu', '--disable-background-networking',
        '--disable-component-update', '--disable-sync', '--disable-default-apps', '--no-first-run', ...args],
    }));
  }
  return running.get(key);
}

export const closeBrowsers = () => Promise.all([...running.values()].map((browser) => browser.close()));

/** Keeps the page's uncaught errors, and its messages of the types that are `wanted`, in `seen`. */
export function watch(page, seen, wanted = (type) => type !== 'log') {
  page.on('pageerror', (error) => seen.errors.push(String(error)));
  page.on('console', (message) => {
    if (wanted(message.type())) seen.console.push(message.text());
  });
}

/** A proxy that answers requests by `answer`, without which it keeps them in `seen.foreign` and
 * refuses them, as it does with TLS and web sockets. */
export async function listen(seen, answer) {
  const refuse = (from, to) => {
    seen.foreign.push(from.url);
    to.writeHead(403).end();
  };
  const proxy = http.createServer(answer ?? refuse);
  proxy.on('connect', (from, socket) => {
    seen.foreign.push(from.url);
    socket.end('HTTP/1.1 403 Forbidden\r\n\r\n');
  });
  await new Promise((listening) => proxy.listen(0, '127.0.0.1', listening));
  return {proxy, server: `http://127.0.0.1:${proxy.address().port}`};
}

// request: {chromium, address, width, dark}; `seen` gets `errors`, `console` and `foreign`.
export async function openWatched(request, height) {
  const seen = {errors: [], console: [], foreign: []};
  const browser = await launch(request.chromium);
  const page = await browser.newPage({
    viewport: {width: request.width, height},
    colorScheme: request.dark ? 'dark' : 'light',
  });
  page.setDefaultTimeout(180000);
  watch(page, seen);
  page.on('request', (of) => {
    if (new URL(of.url()).origin !== new URL(request.address).origin) seen.foreign.push(of.url());
  });
  return {page, seen};
}
