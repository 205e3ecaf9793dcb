// The request of each kind of box, and the commands that send it: curl, and Python.
"use strict";

// The names of files in a command. A field with a file has the name between these characters in place of the content.
const FILE_NAMES = { image: "image.jpg", audio: "speech.wav", video: "clip.mp4" };
const [FILE, END] = ["\ue000", "\ue001"];
const FILES = new RegExp(`${FILE}(${Object.values(FILE_NAMES).join("|").replaceAll(".", "\\.")})${END}`); // no other name
const fileMark = (kind) => `${FILE}${FILE_NAMES[kind]}${END}`;
// Of earlier turns of a chat, whose files would be too long for a command.
const EARLIER_IMAGES = /(data:image\/jpeg;base64,)[\w+/=]{200,}/g;
const JSON_FIELDS = ["word_boxes", "state", "questions"]; // of pipelines

// Each function returns the route and the body, without the name of the system.
const requests = {
  embedding: ({ texts, image, query }) =>
    ["/v1/embeddings", { input: [image ? { image } : query, ...lines(texts)], encoding_format: "float" }],

  rerank: ({ texts, query }) => ["/v1/rerank", { query, documents: lines(texts) }],

  classify: ({ input }) => ["/v1/classify", { input: lines(input) }],

  generation(fields, form) {
    const options = { max_tokens: Number(fields.max_tokens), temperature: Number(fields.temperature) };
    if (fields.mode !== "chat") return ["/v1/completions", { prompt: fields.prompt, ...options }];
    const opening = fields.system ? [{ role: "system", content: fields.system }] : [];
    const messages = [...opening, ...(conversations.get(form) ?? []), ...nextMessages(fields, form)].map(({ shown, ...message }) => message);
    const tools = fields.tools ? { tools: readJson(fields.tools, "Tools") } : {};
    return ["/v1/chat/completions", { messages, ...tools, ...options }];
  },

  pipeline({ candidate_labels: labels, ...fields }, form) {
    if (fields.table) fields.table = JSON.stringify(table(fields.table));
    if (labels) fields.parameters = JSON.stringify(callParameters(fields.parameters, labels));
    return requests.other(fields, form);
  },

  other: (fields, form) => [`/try/${encodeURIComponent(systemOf(form))}`, { inputs: fields }],
};

// The requests that commands show: those of tasks have the form of Hugging Face's API.
const shownRequests = {
  ...requests,

  other(fields, form) {
    if (!("hub" in form.dataset)) return requests.other(fields, form);
    const values = Object.values(fields);
    return [`/models/${systemOf(form)}`, { inputs: values.length === 1 ? values[0] : fields }];
  },

  pipeline({ parameters, candidate_labels: labels, ...fields }, form) {
    const values = Object.entries(fields).map(([name, value]) => {
      if (name === "table") return [name, table(value)];
      return [name, JSON_FIELDS.includes(name) ? readJson(value, name) : value];
    });
    const inputs = values.length === 1 ? values[0][1] : Object.fromEntries(values);
    const chosen = callParameters(parameters, labels);
    return [`/models/${systemOf(form)}`, { inputs, ...(chosen && { parameters: chosen }) }];
  },
};

const systemOf = (form) => form.closest("article").dataset.system;

function requestOf(kinds, form, fields) {
  const [path, body] = kinds[form.dataset.box](fields, form);
  return [path, path.startsWith("/v1/") ? { model: systemOf(form), ...body } : body];
}

// The turns of the chat in each form. `shown` is what the page shows of one.
const conversations = new WeakMap();

function nextMessages({ prompt, image }, form) {
  const { tool_calls: calls } = conversations.get(form)?.at(-1) ?? {};
  if (calls) {
    if (image) throw new Refused("Image: the result of a call is a text.");
    const results = calls.length === 1 ? [prompt] : lines(prompt);
    return calls.map(({ id }, i) => ({ role: "tool", tool_call_id: id, content: results[i] ?? "", shown: results[i] ?? "" }));
  }
  // The server finds the format in the file itself.
  const url = { url: `data:image/jpeg;base64,${image}` };
  const content = image ? [{ type: "image_url", image_url: url }, { type: "text", text: prompt }] : prompt;
  return [{ role: "user", content, shown: prompt }];
}

function callParameters(parameters, labels) {
  const given = parameters ? readJson(parameters, "Parameters") : null;
  if (!labels) return given;
  return { ...given, candidate_labels: labels.split(",").map((label) => label.trim()).filter(Boolean) };
}

// --- commands -------------------------------------------------------------------------------------------------------------

function quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

function curlCommand(url, body, needsKey) {
  const head = [`curl ${quoted(url)}`, "-H 'Content-Type: application/json'"];
  if (needsKey) head.push('-H "Authorization: Bearer $API_KEY"');
  const parts = JSON.stringify(body).split(FILES);
  const names = parts.filter((_, i) => i % 2);
  if (!names.length) return [...head, `-d ${quoted(parts[0])}`].join(" \\\n  ");
  // printf reads backslashes and percent signs.
  const text = parts.map((part, i) => (i % 2 ? "%s" : part.replaceAll("\\", "\\\\").replaceAll("%", "%%"))).join("");
  const files = names.map((name) => `"$(base64 -w0 ${name})"`).join(" ");
  return `printf ${quoted(text)} ${files} |\n  ${[...head, "-d @-"].join(" \\\n  ")}`;
}

function pythonLiteral(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(pythonLiteral).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, own]) => `${JSON.stringify(name)}: ${pythonLiteral(own)}`).join(", ")}}`;
  }
  if (typeof value !== "string") return String(value);
  const parts = value.split(FILES).map((part, i) => (i % 2 ? `base64_of(${JSON.stringify(part)})` : part && JSON.stringify(part)));
  return parts.filter(Boolean).join(" + ") || '""';
}

function pythonCommand(url, body, needsKey) {
  const json = pythonLiteral(body);
  const readsFiles = json.includes("base64_of(");
  return [
    ...(readsFiles ? ["from base64 import b64encode"] : []),
    ...(needsKey ? ["from os import environ"] : []),
    ...(readsFiles ? ["from pathlib import Path"] : []),
    ...(readsFiles || needsKey ? [""] : []),
    "import requests",
    "",
    ...(readsFiles ? ["", "def base64_of(path):", "    return b64encode(Path(path).read_bytes()).decode()", "", ""] : []),
    "response = requests.post(",
    `    ${JSON.stringify(url)},`,
    ...(needsKey ? ['    headers={"Authorization": f"Bearer {environ[\'API_KEY\']}"},'] : []),
    `    json=${json},`,
    ")",
    "print(response.json())",
  ].join("\n");
}

function fieldsOfCommand(form) {
  const fields = {};
  for (const [name, value] of new FormData(form)) {
    const input = form.elements[name];
    const isFile = value instanceof File;
    if (isFile && (value.size || !("optional" in input.dataset))) {
      const mark = fileMark(input.accept.split("/")[0]);
      fields[name] = input.multiple ? [mark, mark] : mark;
    } else if (!isFile && value) fields[name] = value;
  }
  return fields;
}

function prepareCommand(form) {
  const pre = form.closest("article").querySelector("details pre");
  // A system without a box of its own may have another route, whose command stays as it is.
  if (!pre || (form.dataset.box === "other" && !/\/(try|models)\//.test(pre.textContent))) return;
  if (pre.textContent.includes("/models/")) form.dataset.hub = "";
  const code = element("code");
  const python = element("pre", "", code);
  python.tabIndex = 0;
  python.setAttribute("aria-label", `Python for ${systemOf(form)}`);
  pre.after(python);
  const write = () => {
    if (!form.checkValidity()) return; // after a turn of a chat, the commands still send that turn
    try {
      const [path, sent] = requestOf(shownRequests, form, fieldsOfCommand(form));
      const body = JSON.parse(JSON.stringify(sent).replace(EARLIER_IMAGES, `$1${fileMark("image")}`));
      const needsKey = "needsKey" in document.querySelector("main").dataset;
      pre.firstChild.textContent = curlCommand(address(path), body, needsKey);
      code.textContent = pythonCommand(address(path), body, needsKey);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      pre.firstChild.textContent = code.textContent = `# ${error.message}`;
    }
  };
  for (const event of ["input", "change"]) form.addEventListener(event, write);
  write();
}
