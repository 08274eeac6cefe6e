// Runs trace_processor in node, as Perfetto's UI ships it for browsers.
//
//   node trace_processor.mjs DIRECTORY < REQUESTS > REPLIES
//
// DIRECTORY has engine_bundle.js and trace_processor.wasm. REQUESTS and REPLIES are streams of
// TraceProcessorRpc messages (protos/perfetto/trace_processor/trace_processor.proto).

import fs from "node:fs";
import path from "node:path";
import vm from "node:vm";

const directory = process.argv[2];
const bundle = path.join(directory, "engine_bundle.js");

class FileRequest {
  open(_method, url) {
    this.url = url;
  }

  send() {
    this.status = 200;
    this.response = new Uint8Array(fs.readFileSync(path.join(directory, path.basename(this.url)))).buffer;
  }
}

// the globals by which the bundle takes node for a web worker
const self = { location: { href: "file:///" } };
const globals = {
  self,
  WorkerGlobalScope: class {},
  XMLHttpRequest: FileRequest,
  console: new console.Console(process.stderr),
  importScripts: () => {},
  ...Object.fromEntries(["process", "require", "module", "exports", "window", "document"].map((name) => [name, undefined])),
};
vm.compileFunction(fs.readFileSync(bundle, "utf8"), Object.keys(globals))(...Object.values(globals));
await new Promise(setImmediate); // the bundle waits for promises before it listens

const port = { postMessage: (reply) => process.stdout.write(Buffer.from(reply)) };
self.onmessage({ data: port });
for await (const requests of process.stdin) port.onmessage({ data: new Uint8Array(requests) });
