// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Runs Perfetto's trace processor, which its page has as a Web Worker, between standard input and output: requests of
// its RPC protocol in, answers out, both unchanged. Argument: the folder of engine_bundle.js and its WebAssembly.
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const vm = require("node:vm");

const folder = process.argv[2];

class LocalFile {
  open(method, name) {
    this.name = path.join(folder, path.basename(name));
  }
  send() {
    this.response = fs.readFileSync(this.name);
  }
}

// What the bundle asks of a worker, and nothing of Node.js, which it refuses.
const worker = {
  WorkerGlobalScope: Object,
  XMLHttpRequest: LocalFile,
  console: { log: console.error, warn: console.error, error: console.error },
  location: { href: "file:///engine_bundle.js" },
  TextDecoder, URL, crypto, performance, setTimeout,
};
worker.self = worker;
vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), vm.createContext(worker));

function write(answer) {
  for (let done = 0; done < answer.length; ) done += fs.writeSync(1, answer, done);
}

const port = { postMessage: write };
worker.onmessage({ data: port });
// The bundle's own Uint8Array is its context's, and it insists.
const Bytes = vm.runInContext("Uint8Array", worker);
setImmediate(() => process.stdin.on("data", (chunk) => port.onmessage({ data: new Bytes(chunk) })));
