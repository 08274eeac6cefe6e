// Opens an address of `instr view` in headless Chromium and reports what Perfetto's UI shows.
//
// All requests of the browser go through a proxy in this file, which lists them and passes on only
// those to the server of the address.

import http from 'node:http';
import {launch, listen, watch} from './watched.mjs';

// Request: chromium, address, width, height, timeout (s); and optionally queries {name: SQL},
// select (SQL whose first row's `id` is a slice to select), picture (a PNG to write)
export default async function (request) {
  const origin = new URL(request.address).origin;
  const timeout = request.timeout * 1000;
  const seen = {
    loaded: false, dialog: null, title: '', import_errors: 0, tracks: [], pinned: [], drawn: [],
    visible: [0, 0], details: '', rows: {}, requests: [], foreign: [], errors: [], console: [],
  };

  // Chromium's own services (sign-in, autofill) are pointed at this name; no page knows it.
  const OWN = 'http://browsers-own.invalid';

  const {proxy, server} = await listen(seen, (from, to) => {
    const url = new URL(from.url);            // a proxy is sent whole addresses
    if (url.origin !== origin) {
      if (url.origin !== OWN) seen.foreign.push(from.url);
      return to.writeHead(403).end();
    }
    seen.requests.push(url.pathname);
    const {method, headers} = from;
    const passed = http.request(url, {method, headers}, (answer) => {
      to.writeHead(answer.statusCode, answer.headers);
      answer.pipe(to);
    });
    passed.on('error', () => to.destroy());
    from.pipe(passed);
  });

  let page;
  try {
    const browser = await launch(request.chromium, {
      proxy: {server: OWN},            // Chromium itself, for its updates and experiments, gets nowhere
      args: ['--disable-quic', `--gaia-url=${OWN}`, `--autofill-server-url=${OWN}`],
    });
    const {width, height} = request;
    page = await browser.newPage({
      viewport: {width, height},
      proxy: {server},                 // loopback goes through it too
    });
    page.setDefaultTimeout(timeout);
    watch(page, seen, (type) => type === 'error');
    // the hint of how to pan covers the tracks until it has been shown once
    await page.addInitScript(() => localStorage.setItem('dismissedPanningHint', 'true'));
    await page.goto(request.address);
    // wait until the tracks of a trace are drawn, or a dialog tells why they are not
    await page.waitForFunction(
        () => self.app?.trace || document.querySelector('.pf-modal-dialog'), null, {timeout});
    seen.loaded = await page.evaluate(() => Boolean(self.app?.trace));
    const idle = () => page.evaluate(() => self.waitForPerfettoIdle?.(300));
    if (seen.loaded) {
      await idle();
      Object.assign(seen, await page.evaluate(look, request.queries ?? {}));
      if (request.select) {
        await page.evaluate(select, request.select);
        const details = page.locator('.pf-details-shell').first();
        await details.waitFor();
        await idle();
        seen.details = await details.innerText();
        // the arguments are more useful than the times above them
        const args = details.getByText('Arguments', {exact: true}).first();
        if (await args.count()) await args.evaluate((title) => title.scrollIntoView());
      }
    }
    seen.dialog = await page.evaluate(
        () => document.querySelector('.pf-modal-dialog')?.innerText ?? null);
    if (request.picture) await page.screenshot({path: request.picture});
  } finally {
    await page?.context().close();
    proxy.close();
  }
  return seen;
}

// --- in the page ---

/** Selects the slice whose id the query returns, like a click on it. */
async function select(sql) {
  const trace = self.app.trace;
  const {id} = (await trace.engine.query(sql)).firstRow({id: 0});
  trace.selection.selectSqlEvent('slice', id,
      {scrollToSelection: false, switchToCurrentSelectionTab: true});
  const drawer = document.querySelector('.pf-details-shell');
  if (!drawer) self.app.commands.runCommand('dev.perfetto.ToggleDrawer');
}

/** The visible content: tracks in order with their depth, the viewport, rows. */
async function look(queries) {
  const trace = self.app.trace;
  const workspace = trace.currentWorkspace ?? trace.workspace;
  const tracks = [];
  const walk = (node, depth) => {
    for (const child of node.children) {
      tracks.push({name: child.name, depth, expanded: Boolean(child.expanded)});
      walk(child, depth + 1);
    }
  };
  walk(workspace, 0);
  const rows = {};
  for (const [name, sql] of Object.entries(queries)) {
    const result = await trace.engine.query(sql);
    rows[name] = [];
    for (const row = result.iter({}); row.valid(); row.next()) {
      const plain = (value) => typeof value === 'bigint' ? Number(value) : value;
      rows[name].push(result.columns().map((column) => plain(row.get(column))));
    }
  }
  const span = trace.timeline.visibleWindow.toTimeSpan();
  return {
    title: trace.traceInfo.traceTitle,
    import_errors: Number(trace.traceInfo.importErrors),
    tracks,
    pinned: workspace.pinnedTracks.map((track) => track.name),
    drawn: [...document.querySelectorAll('.pf-track__title, .pf-track__name')]
        .map((title) => title.innerText.split('\n')[0]).filter(Boolean),
    visible: [Number(span.start), Number(span.end)],
    rows,
  };
}
