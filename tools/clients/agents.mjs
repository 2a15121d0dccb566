// Loads the MCP tools with the Vercel AI SDK and gives them to the models of three providers. Each
// provider's own code makes the request; none is called: a stub answers with a call of a tool.
import assert from 'node:assert/strict';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createGoogleGenerativeAI } from '@ai-sdk/google';
import { createMCPClient } from '@ai-sdk/mcp';
import { createOpenAI } from '@ai-sdk/openai';
import { generateText } from 'ai';

const TOOL = 'plan_swap';
const INPUT = { direction: 'x2u', chain: 'arbitrum', amount: '0.8' };
const CHOICES = ['anyOf', 'oneOf', 'allOf', 'enum', 'not'];

const PROVIDERS = {
  google: {
    model: (options) => createGoogleGenerativeAI(options)('gemini-2.5-pro'),
    schemas: (body) => body.tools[0].functionDeclarations.map((tool) => tool.parameters),
    answer: {
      candidates: [
        {
          content: { role: 'model', parts: [{ functionCall: { name: TOOL, args: INPUT } }] },
          finishReason: 'STOP',
        },
      ],
    },
  },
  openai: {
    model: (options) => createOpenAI(options)('gpt-5'),
    schemas: (body) => body.tools.map((tool) => tool.parameters),
    answer: {
      id: 'r',
      created_at: 1,
      model: 'gpt-5',
      output: [
        {
          type: 'function_call',
          id: 'f',
          call_id: 'c',
          name: TOOL,
          arguments: JSON.stringify(INPUT),
          status: 'completed',
        },
      ],
      usage: { input_tokens: 1, output_tokens: 1 },
    },
  },
  anthropic: {
    model: (options) => createAnthropic(options)('claude-sonnet-4-5'),
    schemas: (body) => body.tools.map((tool) => tool.input_schema),
    answer: {
      type: 'message',
      id: 'm',
      model: 'claude-sonnet-4-5',
      content: [{ type: 'tool_use', id: 'c', name: TOOL, input: INPUT }],
      stop_reason: 'tool_use',
      usage: { input_tokens: 1, output_tokens: 1 },
    },
  },
};

// What the providers' APIs refuse: a choice at the root, an enum of more than one type.
function check(schema, isRoot = true) {
  if (typeof schema !== 'object' || schema === null) return;
  if (isRoot) {
    assert.equal(schema.type, 'object');
    for (const choice of CHOICES) assert(!(choice in schema), `${choice} at the root`);
  }
  if (Array.isArray(schema.enum)) {
    const types = new Set(schema.enum.map((value) => (value === null ? 'null' : typeof value)));
    assert.equal(types.size, 1, `an enum of ${[...types].join(' and ')}`);
  }
  for (const part of Object.values(schema)) check(part, false);
}

const client = await createMCPClient({ transport: { type: 'http', url: `${process.env.SITE}/mcp` } });
try {
  const tools = await client.tools();
  for (const [name, { model, schemas, answer }] of Object.entries(PROVIDERS)) {
    let sent;
    const fetch = async (_url, { body }) => {
      sent = JSON.parse(body);
      return Response.json(answer);
    };
    const options = { apiKey: 'none', fetch };
    const result = await generateText({ model: model(options), tools, prompt: 'Swap 0.8 XMR.' });
    const found = schemas(sent).filter((schema) => schema !== undefined);
    found.forEach((schema) => check(schema));
    // A tool without inputs has no schema at Google.
    const without = Object.keys(tools).length - found.length;
    assert(without === 0 || (name === 'google' && without === 1), `${without} without a schema`);
    assert.deepEqual(result.warnings ?? [], []);
    assert.equal(result.toolResults[0]?.output.structuredContent.state, 'needs_destination');
    console.log(`ok ${name}: ${Object.keys(tools).length} tools`);
  }
} finally {
  await client.close();
}
