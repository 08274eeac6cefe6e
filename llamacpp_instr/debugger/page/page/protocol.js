// The Debug Adapter Protocol over a WebSocket: requests, their answers, and events.

export class Connection {
  #socket = null;
  #seq = 0;
  #waiting = new Map();
  #over = false;

  // `onEvent(name, body)`; `onLost(isOver)` when the connection ends; it comes back by itself
  constructor(onEvent, onLost) {
    this.onEvent = onEvent;
    this.onLost = onLost;
    this.#open();
  }

  // The body of the answer; rejects with the adapter's line.
  request(command, args = {}) {
    if (this.#socket.readyState !== WebSocket.OPEN) return Promise.reject(new Error("not connected"));
    const seq = ++this.#seq;
    this.#socket.send(JSON.stringify({ seq, type: "request", command, arguments: args }));
    return new Promise((resolve, reject) => this.#waiting.set(seq, { resolve, reject }));
  }

  // One of the debugger's own commands; returns its text.
  async command(line) {
    return (await this.request("evaluate", { expression: line, context: "repl" })).result;
  }

  // Ends the session; the server ends, too.
  quit() {
    this.#over = true;
    return this.request("disconnect").catch(() => {});
  }

  #open() {
    const address = new URL("dap", location.href);
    address.protocol = "ws:";
    this.#socket = new WebSocket(address);
    this.#socket.onmessage = (message) => {
      const received = JSON.parse(message.data);
      if (received.type === "event") this.onEvent(received.event, received.body || {});
      else this.#answered(received);
    };
    this.#socket.onclose = () => {
      for (const { reject } of this.#waiting.values()) reject(new Error("the connection was lost"));
      this.#waiting.clear();
      this.onLost(this.#over);
      if (!this.#over) setTimeout(() => this.#open(), 1000);
    };
  }

  #answered(answer) {
    const waiting = this.#waiting.get(answer.request_seq);
    this.#waiting.delete(answer.request_seq);
    if (!waiting) return;
    if (answer.success) waiting.resolve(answer.body || {});
    else waiting.reject(new Error(answer.message || "refused"));
  }
}

// A word of a command, whatever is in it.
export const quoted = (word) => (/^[\w.\-:]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);

// A name as a pattern that matches only itself.
export const literal = (name) => name.replace(/[*?[]/g, "[$&]");
