// node openai.js URL: asks by OpenAI's own client for Node, whole and streamed; prints one JSON object.
'use strict';

const OpenAI = require('openai');

const messages = [{ role: 'user', content: 'a fox' }];
const parameters = { type: 'object', properties: { text: { type: 'string' } } };
const tool = { type: 'function', function: { name: 'find', parameters } };
const shape = { type: 'object', properties: { legs: { type: 'integer' } }, required: ['legs'] };

async function streamed(client, request) {
  const stream = client.chat.completions.stream(request);
  const parts = [];
  stream.on('tool_calls.function.arguments.delta', (part) => parts.push(part.arguments_delta));
  let text = '';
  stream.on('content', (delta) => { text += delta; });
  const { message, finish_reason } = (await stream.finalChatCompletion()).choices[0];
  return { text, parts, message, finish_reason };
}

async function responded(client, request) {
  const stream = client.responses.stream(request);
  const kinds = [];
  stream.on('event', (event) => kinds.push(event.type));
  return { kinds, response: await stream.finalResponse() };
}

async function refused(promise) {
  try {
    await promise;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, param: error.param, message: error.message };
  }
  return null;
}

async function main(baseURL) {
  const client = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0, timeout: 60000 });
  const model = (await client.models.list()).data[0].id;
  const chat = { model, messages, max_completion_tokens: 400 };
  const ask = { ...chat, tools: [tool] };
  const format = { type: 'json_schema', json_schema: { name: 'fox', strict: true, schema: shape } };
  console.log(JSON.stringify({
    whole: (await client.chat.completions.create(ask)).choices[0],
    streamed: await streamed(client, ask),
    responded: await responded(client, {
      model, input: 'a fox', max_output_tokens: 400, tools: [{ type: 'function', name: 'find', strict: null, parameters }],
    }),
    shaped: (await client.chat.completions.create({ ...chat, response_format: format })).choices[0].message.content,
    refused: await refused(client.chat.completions.create({ ...chat, top_p: 7 })),
    refused_stream: await refused(streamed(client, { ...ask, tool_choice: 'some' })),
  }));
}

main(process.argv[2]).catch((error) => {
  console.error(error);
  process.exit(1);
});
