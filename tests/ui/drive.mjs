// Does one thing with a page of headless Chromium, which stays open between requests: {open}, {goto},
// {click}, {fill, text}, {hover, x, y}, {wait} (an expression that must become true), {read} (an
// expression), {picture}, {size}, {dark}, {print}, {seen}, {close}.

import {launch, watch} from './watched.mjs';

let page, seen, origin;

const actions = {
  open: async (_, chromium) => {
    const browser = await launch(chromium);
    page = await browser.newPage({viewport: {width: 1280, height: 900}, colorScheme: 'light'});
    seen = {errors: [], console: [], foreign: []};
    origin = null;
    page.setDefaultTimeout(120000);
    watch(page, seen);
    page.on('request', (asked) => {
      if (origin && new URL(asked.url()).origin !== origin && !asked.url().startsWith('data:'))
        seen.foreign.push(asked.url());
    });
  },
  close: () => page.context().close(),
  goto: async ({goto}) => {
    origin = new URL(goto).origin;
    await page.goto(goto);
  },
  click: ({click}) => page.click(click),
  fill: async ({fill, text}) => {
    await page.fill(fill, text);
    await page.press(fill, 'Enter');
  },
  hover: async ({hover, x, y}) => {
    const box = await page.locator(hover).boundingBox();
    await page.hover(hover, {position: {x: x * box.width, y: y * box.height}});
  },
  // as evaluate, which the page's policy does not stop
  wait: async ({wait}) => {
    const end = Date.now() + 120000;
    while (!await page.evaluate(wait)) {
      if (Date.now() > end) throw new Error(`it did not become true: ${wait}`);
      await page.waitForTimeout(20);
    }
  },
  read: ({read}) => page.evaluate(read),
  picture: async ({picture, whole}) => void await page.screenshot({path: picture, fullPage: whole}),
  size: ({size: [width, height]}) => page.setViewportSize({width, height}),
  dark: ({dark}) => page.emulateMedia({colorScheme: dark ? 'dark' : 'light'}),
  print: ({print}) => page.emulateMedia({media: print ? 'print' : 'screen'}),
  seen: () => seen,
};

export default ({chromium, ...wanted}) => actions[Object.keys(wanted)[0]](wanted, chromium);
