// Asks a server with the clients that npm has, and prints what they understood as one JSON object.
//
//   NODE_PATH=node_modules node node_clients.cjs URL

const OpenAI = require("openai");
const Anthropic = require("@anthropic-ai/sdk");

const HI = [{ role: "user", content: "Hi" }];
const PARAMETERS = { type: "object", properties: {} };

async function main(url) {
  const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });

  const whole = await openai.chat.completions.create({ model: "k3", messages: HI });
  const chat = { content: whole.choices[0].message.content, reasoning: whole.choices[0].message.reasoning_content };

  const tools = [{ type: "function", function: { name: "add", parameters: PARAMETERS } }];
  const stream = openai.chat.completions.stream({ model: "k3", messages: HI, tools });
  const called = (await stream.finalChatCompletion()).choices[0];
  const calls = called.message.tool_calls.map((call) => [call.function.name, call.function.arguments]);

  const events = openai.responses.stream({ model: "k3", input: "Hi" });
  const response = await events.finalResponse();

  const message = await anthropic.messages
    .stream({ model: "k3", max_tokens: 500, messages: HI, tools: [{ name: "add", input_schema: PARAMETERS }] })
    .finalMessage();

  let refusal;
  try {
    await openai.chat.completions.create({ model: "other", messages: HI });
  } catch (error) {
    refusal = [error.status, error.code, Boolean(error.requestID)];
  }
  console.log(
    JSON.stringify({
      chat,
      calls: { reason: called.finish_reason, calls },
      response: { status: response.status, text: response.output_text },
      message: { reason: message.stop_reason, blocks: message.content.map((b) => [b.type, b.thinking ?? b.input ?? b.text]) },
      refusal,
    }),
  );
}

main(process.argv[2]);
