// Runs trace_processor in node, as Perfetto's UI ships it for browsers.
//
//   node trace_processor.mjs DIRECTORY
//
// DIRECTORY has engine_bundle.js and trace_processor.wasm. Standard input has requests, standard
// output the replies to each: four bytes for the length, then a TraceProcessorRpcStream
// (protos/perfetto/trace_processor/trace_processor.proto).

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

const read = (length) => {
  const bytes = Buffer.alloc(length);
  for (let at = 0; at < length;) {
    const n = fs.readSync(0, bytes, at, length - at);
    if (!n) process.exit();
    at += n;
  }
  return bytes;
};

let replies = [];
const port = { postMessage: (reply) => replies.push(Buffer.from(reply)) };
self.onmessage({ data: port });
for (;;) {
  replies = [];
  port.onmessage({ data: new Uint8Array(read(read(4).readUInt32LE())) });
  const length = Buffer.alloc(4);
  length.writeUInt32LE(replies.reduce((sum, reply) => sum + reply.length, 0));
  for (let bytes = Buffer.concat([length, ...replies]); bytes.length;) bytes = bytes.subarray(fs.writeSync(1, bytes));
}
