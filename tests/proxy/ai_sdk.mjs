// A tool loop through the AI SDK: `node ai_sdk.mjs PROVIDER BASE KEY` prints what the SDK made of every streamed step, as JSON.
import { stepCountIs, streamText, tool } from "ai"
import { createAnthropic } from "@ai-sdk/anthropic"
import { createGoogleGenerativeAI } from "@ai-sdk/google"
import { createOpenAI } from "@ai-sdk/openai"
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { z } from "zod"

const [provider, base, apiKey] = process.argv.slice(2)
const models = {
  chat: () => createOpenAICompatible({ name: "p", baseURL: base + "/v1", apiKey, includeUsage: true })("m"),
  responses: () => createOpenAI({ baseURL: base + "/v1", apiKey }).responses("m"),
  anthropic: () => createAnthropic({ baseURL: base + "/v1", apiKey })("m"),
  gemini: () => createGoogleGenerativeAI({ baseURL: base + "/v1beta", apiKey })("m"),
}
const errors = []
const result = streamText({
  model: models[provider](),
  system: "You are an agent.",
  prompt: "List the files.",
  tools: {
    bash: tool({
      description: "Run a command",
      inputSchema: z.object({ command: z.string() }),
      execute: async ({ command }) => "ran " + command,
    }),
  },
  stopWhen: stepCountIs(4),
  maxRetries: 0,
  onError: ({ error }) => errors.push(String(error)),
})
await result.consumeStream()
const steps = (await result.steps).map((step) => ({
  text: step.text,
  reasoning: step.reasoningText ?? null,
  calls: step.toolCalls.map((call) => [call.toolName, call.input]),
  finish: step.finishReason,
  usage: [step.usage.inputTokens, step.usage.outputTokens],
}))
console.log(JSON.stringify({ steps, errors }))
