// Drives a debug adapter with Microsoft's client library for tests of debug adapters.
//
// Arguments: the runtime and the executable of the adapter. Standard input: lines
// {id, call, arguments}, methods of its DebugClient; standard output: {id, body} or {id, error}
// for each when it is done, and {event, body} for every event.

import readline from 'node:readline';
import support from '@vscode/debugadapter-testsupport';

const client = new support.DebugClient(...process.argv.slice(2), 'llamacpp-instr');
client.defaultTimeout = 60000;
const say = (what) => process.stdout.write(`${JSON.stringify(what)}\n`);
const emit = client.emit.bind(client);
client.emit = (event, message) => {
  say({event, body: message.body});
  return emit(event, message);
};
for await (const line of readline.createInterface({input: process.stdin})) {
  const asked = JSON.parse(line);
  client[asked.call](...asked.arguments).then(
      (done) => say({id: asked.id, body: done?.body ?? null}),
      (error) => say({id: asked.id, error: error.message}));
}
process.exit();  // the end of its input ends the adapter
