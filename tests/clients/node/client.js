// node client.js TARGET: streams, cancels in mid-stream, is refused and reads health; prints one JSON object.
'use strict';

const path = require('path');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const PROTOS = path.resolve(__dirname, '../../../protos');

function load(file) {
  const options = { keepCase: true, longs: String, enums: String, defaults: false, includeDirs: [PROTOS, __dirname] };
  return grpc.loadPackageDefinition(protoLoader.loadSync(file, options));
}

const { Inference } = load('baton/v1/inference.proto').baton.v1;
const { Health } = load('health.proto').grpc.health.v1;

function deadline(seconds) {
  return new Date(Date.now() + seconds * 1000);
}

function unary(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, { deadline: deadline(30) }, (error, reply) => (error ? reject(error) : resolve(reply)));
  });
}

// Reads a stream to its end, or cancels it after `limit` messages; resolves with what came and the code it ended with.
function read(call, limit = Infinity) {
  return new Promise((resolve) => {
    const messages = [];
    call.on('data', (message) => {
      messages.push(message);
      if (messages.length === limit) call.cancel();
    });
    call.on('error', (error) => resolve({ messages, code: error.code, details: error.details }));
    call.on('end', () => resolve({ messages, code: grpc.status.OK }));
  });
}

async function main(target) {
  const credentials = grpc.credentials.createInsecure();
  const inference = new Inference(target, credentials);
  const health = new Health(target, credentials);

  const prompt = { text: 'def quick_brown_fox(self):' };
  const ask = (maxTokens) => ({
    ...prompt,
    sampling: { temperature: 0 },
    stopping: { max_tokens: maxTokens, ignore_eos: true },
  });
  const stream = await read(inference.Generate(ask(16), { deadline: deadline(30) }));
  const complete = await unary(inference, 'Complete', ask(16));
  const cancelled = await read(inference.Generate(ask(500), { deadline: deadline(30) }), 2);
  const refused = await read(inference.Generate({ ...prompt, stopping: { max_tokens: 0 } }));
  const check = await unary(health, 'Check', { service: '' });
  const watch = await read(health.Watch({ service: '' }), 1);
  const info = await unary(inference, 'GetModelInfo', {});

  inference.close();
  health.close();
  const last = stream.messages[stream.messages.length - 1];
  console.log(JSON.stringify({
    stream: {
      code: stream.code,
      text: stream.messages.map((message) => message.text || '').join(''),
      token_ids: stream.messages.flatMap((message) => message.token_ids || []),
      usage: last.usage,
      ttft_s: last.timing.ttft_s,
    },
    complete: { text: complete.choices[0].text, token_ids: complete.choices[0].token_ids },
    cancelled: { code: cancelled.code, num_messages: cancelled.messages.length },
    refused: { code: refused.code, details: refused.details },
    health: { check: check.status, watch: watch.messages[0].status },
    info,
  }));
}

if (process.argv.length !== 3) {
  console.error('usage: node client.js HOST:PORT');
  process.exit(2);
}
main(process.argv[2]).catch((error) => {
  console.error(error);
  process.exit(1);
});
