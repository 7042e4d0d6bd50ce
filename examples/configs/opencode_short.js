// An opencode plugin that shortens what the model reads, because on two cores every prompt token costs time: 1,500 tokens become 180.
const SYSTEM = "Solve the task with one bash command. Then say: Done."

export const ShortPrompts = async () => ({
  "experimental.chat.system.transform": async (_input, output) => {
    output.system.splice(0, output.system.length, SYSTEM)
  },
  "tool.definition": async (input, output) => {
    if (input.toolID !== "bash") return
    output.description = "Run a shell command."
    output.jsonSchema = { type: "object", properties: { command: { type: "string" } }, required: ["command"] }
  },
})
