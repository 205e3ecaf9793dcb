// The boxes to try a system, the copy buttons, and figures that stay fresh. The page is complete without it.
// Whatever a server answers is put into text nodes, never into HTML.
"use strict";

const REFRESH_MS = 5000;
const SHOWN = 12; // of a long list of answers
const IMAGE_PIXELS = 1600; // the longer side of an image that is too large to send as it is

function element(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

// --- requests ---------------------------------------------------------------------------------------------------------

class Refused extends Error {}
const UNREACHABLE = "The gateway does not answer, or ended the connection. `make status` shows its state.";

// An address in full, because fetch refuses one relative to a page that was opened as https://user:key@host/.
const address = (path) => location.origin + path;

async function post(path, body, signal) {
  const response = await fetch(address(path), {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (response.ok) return response;
  const text = await response.text();
  throw new Refused(errorMessage(text) || `The gateway answered ${response.status}.`);
}

function errorMessage(text) {
  try {
    const { error } = JSON.parse(text);
    return error.param ? `${error.param}: ${error.message}` : error.message;
  } catch {
    return "";
  }
}

async function* events(response) {
  // Server-sent events as the API writes them: each is one line, and a blank line ends it.
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice("data: ".length);
      if (data === "[DONE]") return;
      if (errorMessage(data)) throw new Refused(errorMessage(data));
      yield JSON.parse(data);
    }
  }
}

// --- what an answer looks like ------------------------------------------------------------------------------------------

function bars(rows) {
  // Each row has a label, a value, and the share of the width that its bar fills: 0 to 1.
  const list = element("ol", "bars");
  for (const { label, value, share } of rows.slice(0, SHOWN)) {
    const bar = element("span", "bar");
    bar.style.width = `${Math.round(Math.max(0, Math.min(1, share)) * 1000) / 10}%`;
    list.append(element("li", "", bar, element("span", "label", label), element("span", "value", value)));
  }
  if (rows.length <= SHOWN) return [list];
  return [list, element("p", "faint", `and ${rows.length - SHOWN} more`)];
}

function marked(text, spans) {
  // The spans count characters, not UTF-16 units.
  const characters = Array.from(text);
  const node = element("p", "text");
  let end = 0;
  for (const span of [...spans].sort((a, b) => a.start - b.start)) {
    if (span.start < end) continue;
    const mark = element("mark", "", characters.slice(span.start, span.end).join(""));
    if (span.label) mark.append(" ", element("small", "", `${span.label} ${rounded(span.score)}`));
    node.append(characters.slice(end, span.start).join(""), mark);
    end = span.end;
  }
  node.append(characters.slice(end).join(""));
  return node;
}

function stripes(values) {
  // Numbers as a strip of colours, so that a glance shows whether two answers differ.
  const canvas = element("canvas");
  canvas.width = values.length;
  canvas.height = 1;
  canvas.setAttribute("aria-hidden", "true");
  const context = canvas.getContext("2d");
  const largest = Math.max(...values.map(Math.abs)) || 1;
  values.forEach((value, x) => {
    context.fillStyle = `hsl(${value < 0 ? 25 : 212} 80% 50% / ${Math.abs(value) / largest})`;
    context.fillRect(x, 0, 1, 1);
  });
  return canvas;
}

function rounded(value) {
  return value === 0 || Math.abs(value) >= 0.001 ? value.toFixed(3) : value.toExponential(1);
}

function number(value) {
  return Number.isInteger(value) ? String(value) : rounded(value);
}

function note(...parts) {
  return element("p", "faint", parts.filter(Boolean).join(" · "));
}

function tokens(usage) {
  const count = usage && (usage.total_tokens ?? usage.prompt_tokens);
  return count ? `${count} ${count === 1 ? "token" : "tokens"}` : "";
}

function rate(count, milliseconds) {
  return count > 0 && milliseconds > 0 ? `${(count * 1000 / milliseconds).toFixed(1)} tokens/s` : "";
}

function lines(text) {
  return text.split("\n").map((line) => line.trim()).filter(Boolean);
}

function cosine(a, b) {
  let product = 0;
  let squaresOfA = 0;
  let squaresOfB = 0;
  a.forEach((x, i) => {
    product += x * b[i];
    squaresOfA += x * x;
    squaresOfB += b[i] * b[i];
  });
  return product / (Math.sqrt(squaresOfA * squaresOfB) || 1);
}

// --- one function for each kind of box: it sends the fields and shows the answer -------------------------------------------

const boxes = {
  async embedding({ request, fields, answer, signal, elapsed }) {
    const [, { input: [, ...texts] }] = request;
    const { data, usage } = await (await post(...request, signal)).json();
    const [query, ...vectors] = data.map((entry) => entry.embedding);
    const rows = texts.map((label, i) => ({ label, similarity: cosine(query, vectors[i]) }));
    rows.sort((a, b) => b.similarity - a.similarity);
    answer.replaceChildren(
      ...bars(rows.map((row) => ({ ...row, value: rounded(row.similarity), share: row.similarity }))),
      note(`cosine similarity to the ${fields.image ? "image" : "query"}`, `${query.length} numbers each`, tokens(usage), elapsed()),
    );
  },

  async rerank({ request, answer, signal, elapsed }) {
    const [, { documents }] = request;
    const { results, usage } = await (await post(...request, signal)).json();
    const scores = results.map((result) => result.relevance_score);
    // Scores between 0 and 1 are shown as they are; others, such as logits, relative to the best and the worst.
    const inUnitInterval = scores.every((score) => score >= 0 && score <= 1);
    const [low, high] = inUnitInterval ? [0, 1] : [Math.min(...scores), Math.max(...scores)];
    const rows = results.map(({ index, relevance_score: score }) => ({
      label: documents[index],
      value: rounded(score),
      share: high > low ? (score - low) / (high - low) : 1,
    }));
    answer.replaceChildren(...bars(rows), note("relevance", tokens(usage), elapsed()));
  },

  async classify({ request, answer, signal, elapsed }) {
    const [, { input }] = request;
    const { data, usage } = await (await post(...request, signal)).json();
    const rows = data.map(({ index, label, probs }) => {
      const probability = Math.max(...probs);
      return { label: `${input[index]} → ${label}`, value: rounded(probability), share: probability };
    });
    answer.replaceChildren(...bars(rows), note(tokens(usage), elapsed()));
  },

  async generation({ request: [path, body], fields, form, answer, signal, milliseconds, streams }) {
    const chats = fields.mode === "chat";
    const before = chats ? conversations.get(form) ?? [] : [];
    const turns = chats ? [...before, ...nextMessages(fields, form)] : [];
    const options = streams ? { stream: true, stream_options: { include_usage: true } } : {};
    const text = element("p", "text growing");
    if (chats) form.elements.prompt.value = "";
    else text.append(element("span", "faint", fields.prompt));
    answer.replaceChildren(...turns.map(turnNode), text);
    answer.scrollTop = answer.scrollHeight;
    let whole = "";
    const calls = [];
    const thoughts = element("span", "faint thoughts");
    let first = 0;
    let reason = "";
    let usage = null;
    try {
      const response = await post(path, { ...body, ...options }, signal);
      for await (const piece of streams ? events(response) : [await response.json()]) {
        const isAtEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 40;
        usage = piece.usage ?? usage;
        const [choice] = piece.choices;
        if (!choice) continue;
        const { reasoning_content: reasoning, content, tool_calls: called = [] } = choice.delta ?? choice.message ?? {};
        const added = choice.text ?? content ?? "";
        if (reasoning || added || called.length) first ||= milliseconds();
        called.forEach((call, i) => {
          const place = call.index ?? i; // a stream has the arguments in pieces
          if (calls[place]) calls[place].function.arguments += call.function.arguments;
          else calls[place] = { id: call.id, type: call.type, function: { arguments: "", ...call.function } };
        });
        if (reasoning && !thoughts.isConnected) text.append(thoughts);
        thoughts.append(reasoning ?? "");
        text.append(added);
        whole += added;
        reason = choice.finish_reason ?? reason;
        if (isAtEnd) answer.scrollTop = answer.scrollHeight;
      }
    } finally {
      text.classList.remove("growing");
      text.append(...calls.map(callNode));
      if (!first) {
        // Nothing came: the message can be sent again.
        answer.replaceChildren(...before.map(turnNode));
        form.elements.prompt.value ||= fields.prompt;
      } else if (chats) {
        // An answer that was stopped is a turn, too.
        const answered = { role: "assistant", content: whole, shown: whole, ...(reason === "tool_calls" && { tool_calls: calls }) };
        conversations.set(form, [...turns, answered]);
        if (form.elements.image) choose(form.elements.image);
      }
      if (chats) form.querySelector("[data-new]").hidden = !conversations.has(form);
    }
    answer.append(
      note(
        usage && `${usage.prompt_tokens} tokens read, ${usage.completion_tokens} written`,
        streams && usage && rate(usage.completion_tokens - 1, milliseconds() - first),
        streams && first && `first token after ${first} ms`,
        ENDS[reason],
      ),
    );
    answer.scrollTop = answer.scrollHeight;
  },

  async pipeline({ request, form, answer, signal, elapsed }) {
    const [, { inputs }] = request;
    const { outputs } = await (await post(...request, signal)).json();
    const result = JSON.parse(outputs[0].data[0]);
    answer.replaceChildren(...await drawn(form.dataset.answer, result, inputs), note(elapsed()));
  },

  async other({ request, fields, answer, signal, elapsed }) {
    const { outputs } = await (await post(...request, signal)).json();
    answer.replaceChildren(...outcome(outputs, fields), note(elapsed()));
  },
};

// Why a text ended.
const ENDS = {
  length: "stopped at the maximum number of tokens",
  tool_calls: "the next message is the result of the call; of several, one in each line",
};

function turnNode({ role, shown, tool_calls: calls = [] }) {
  return element("p", role === "assistant" ? "text" : "asked", shown, ...calls.map(callNode));
}

function callNode({ function: { name, arguments: given } }) {
  return element("code", "call", `${name}(${given})`);
}

function outcome(outputs, fields) {
  // Recognize the answers of tasks by the names of their outputs; show other tensors as numbers and texts.
  const data = Object.fromEntries(outputs.map((output) => [output.name, output.data]));
  if (data.answer && data.start) {
    const [start, end] = [data.start[0], data.end[0]];
    return [marked(fields.context, end > start ? [{ start, end }] : []), note(`score ${rounded(data.score[0])}`)];
  }
  if (data.label && data.start) {
    const spans = data.label.map((label, i) => ({ label, score: data.score[i], start: data.start[i], end: data.end[i] }));
    return [marked(fields.input_text, spans), ...(spans.length ? [] : [note("nothing recognized")])];
  }
  if (data.label && data.score) {
    return bars(data.label.map((label, i) => ({ label, value: rounded(data.score[i]), share: data.score[i] })));
  }
  const weights = data.weight ?? data.score;
  if (data.token && weights) {
    const rows = data.token.map((label, i) => ({ label, value: rounded(weights[i]), weight: weights[i] }));
    rows.sort((a, b) => b.weight - a.weight);
    const largest = data.score ? 1 : rows[0]?.weight;
    return bars(rows.map((row) => ({ ...row, share: row.weight / largest })));
  }
  return outputs.map(tensor);
}

function tensor({ name, datatype, shape, data }) {
  const node = element("div", "tensor", element("code", "", name), ` ${datatype} [${shape.join(", ")}]`);
  if (datatype === "BYTES") node.append(...data.map((text) => element("p", "text", text)));
  else if (data.every((value) => typeof value === "number")) {
    const shown = data.slice(0, 6).map(number).join(", ");
    node.append(stripes(data), element("span", "faint", data.length > 6 ? `${shown}, ...` : shown));
  } else node.append(element("p", "text", data.join(", ")));
  return node;
}

// --- files ----------------------------------------------------------------------------------------------------------------

async function fileAsBase64(file, limit, isImage) {
  // Base64 makes four characters of three bytes; the rest of the body is small.
  const fits = (blob) => blob.size * 4 / 3 + 1000 < limit;
  const blob = fits(file) || !isImage ? file : await smaller(file);
  if (!fits(blob)) {
    throw new Refused(isImage ? "The image is too large, also after it was scaled down." : "The file is larger than a request may be.");
  }
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Refused("The browser cannot read the file."));
    reader.readAsDataURL(blob);
  });
  return url.slice(url.indexOf(",") + 1);
}

async function smaller(file) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Refused("The file is too large, and the browser does not know it as an image.");
  });
  const scale = Math.min(1, IMAGE_PIXELS / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return toJpeg(canvas);
}

function toJpeg(canvas) {
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.9));
}

async function sampleImage() {
  // A landscape: sky, sun, hills.
  const canvas = element("canvas");
  [canvas.width, canvas.height] = [384, 256];
  const context = canvas.getContext("2d");
  const sky = context.createLinearGradient(0, 0, 0, 200);
  sky.addColorStop(0, "#3c6fb4");
  sky.addColorStop(1, "#f6c98f");
  context.fillStyle = sky;
  context.fillRect(0, 0, 384, 256);
  context.fillStyle = "#fff3c4";
  context.beginPath();
  context.arc(285, 80, 28, 0, 7);
  context.fill();
  for (const [colour, base, height, width] of [["#6c7f9c", 170, 55, 61], ["#4a6b52", 205, 30, 43], ["#2f4a35", 235, 18, 29]]) {
    context.fillStyle = colour;
    context.beginPath();
    context.moveTo(0, 256);
    for (let x = 0; x <= 384; x += 4) context.lineTo(x, base - height * Math.abs(Math.sin(x / width)));
    context.lineTo(384, 256);
    context.fill();
  }
  return new File([await toJpeg(canvas)], "sample.jpg", { type: "image/jpeg" });
}

function sampleSound() {
  // A second of two tones, as a WAV file: its header, then samples of 16 bits.
  const rate = 16000;
  const file = new DataView(new ArrayBuffer(44 + 2 * rate));
  const text = (at, letters) => Array.from(letters, (letter, i) => file.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  file.setUint32(4, 36 + 2 * rate, true);
  text(8, "WAVEfmt ");
  file.setUint32(16, 16, true);
  file.setUint16(20, 1, true);
  file.setUint16(22, 1, true);
  file.setUint32(24, rate, true);
  file.setUint32(28, 2 * rate, true);
  file.setUint16(32, 2, true);
  file.setUint16(34, 16, true);
  text(36, "data");
  file.setUint32(40, 2 * rate, true);
  for (let i = 0; i < rate; i++) {
    file.setInt16(44 + 2 * i, 8000 * Math.sin(2 * Math.PI * (i < rate / 2 ? 440 : 660) * i / rate), true);
  }
  return new File([file], "sample.wav", { type: "audio/wav" });
}

function choose(input, ...files) {
  const transfer = new DataTransfer();
  files.forEach((file) => transfer.items.add(file));
  input.files = transfer.files;
  input.dispatchEvent(new Event("change", { bubbles: true }));
}

function prepareFile(field) {
  const input = field.querySelector("input");
  const preview = field.querySelector("[data-preview]");
  input.addEventListener("change", () => {
    if (preview.src) URL.revokeObjectURL(preview.src);
    preview.hidden = !input.files.length;
    if (input.files.length) preview.src = URL.createObjectURL(input.files[0]);
  });
  // A format that the browser cannot show may be one that the model reads.
  preview.addEventListener("error", () => { preview.hidden = true; });
  field.querySelector("[data-sample]")?.addEventListener("click", async () => {
    const sample = input.accept === "audio/*" ? sampleSound() : await sampleImage();
    choose(input, ...Array(input.multiple ? 2 : 1).fill(sample));
  });
  const button = field.querySelector("[data-record]");
  if (button) prepareRecording(button, input);
}

function prepareRecording(button, input) {
  // Browsers have a microphone only for pages with TLS, and on localhost.
  if (!navigator.mediaDevices || !window.MediaRecorder) return;
  button.hidden = false;
  let recorder = null;
  button.addEventListener("click", async () => {
    if (recorder) {
      recorder.stop();
      return;
    }
    button.disabled = true;
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      const parts = [];
      recorder = new MediaRecorder(stream);
      recorder.addEventListener("dataavailable", (event) => parts.push(event.data));
      recorder.addEventListener("stop", () => {
        stream.getTracks().forEach((track) => track.stop());
        choose(input, new File(parts, "recording", { type: recorder.mimeType }));
        recorder = null;
        button.textContent = "Record";
      });
      recorder.start();
      button.textContent = "Stop recording";
    } catch {
      const answer = button.form.querySelector(".answer");
      answer.replaceChildren(element("p", "error", "The browser gave no microphone. Allow it for this page, or choose a file."));
    }
    button.disabled = false;
  });
}

function paste(event) {
  // An image goes into the form with the focus, or into the only one that takes an image.
  const images = Array.from(event.clipboardData.files).filter((file) => file.type.startsWith("image/"));
  const all = Array.from(document.querySelectorAll('form input[accept="image/*"]'));
  const own = all.filter((input) => input.form.contains(event.target));
  const [input] = own.length || all.length > 1 ? own : all;
  if (!images.length || !input) return;
  event.preventDefault();
  choose(input, ...(input.multiple ? [...input.files, ...images] : images.slice(0, 1)));
}

// --- the forms ------------------------------------------------------------------------------------------------------------

async function readFields(form) {
  const fields = {};
  for (const [name, value] of new FormData(form)) {
    if (!(value instanceof File)) {
      if (value) fields[name] = value;
      continue;
    }
    const input = form.elements[name];
    if (!value.size && "optional" in input.dataset) continue;
    if (!value.size) throw new Refused("Choose a file, or use the sample.");
    const limit = Number(document.querySelector("main").dataset.bodyLimit) / input.files.length;
    const file = await fileAsBase64(value, limit, input.accept === "image/*");
    fields[name] = input.multiple ? [...(fields[name] ?? []), file] : file;
  }
  for (const [name, value] of Object.entries(fields)) if (Array.isArray(value)) fields[name] = JSON.stringify(value);
  return fields;
}

function prepare(form) {
  const answer = form.querySelector(".answer");
  const submit = form.querySelector("[type=submit]");
  const stop = form.querySelector("[data-stop]");
  let running = null;
  form.querySelectorAll(".file").forEach(prepareFile);
  stop.addEventListener("click", () => running?.abort());
  form.querySelector("[data-new]")?.addEventListener("click", ({ target }) => {
    running?.abort();
    conversations.delete(form);
    answer.replaceChildren();
    target.hidden = true;
    form.elements.prompt.value = form.elements.prompt.defaultValue;
    form.dispatchEvent(new Event("input"));
  });
  form.addEventListener("input", () => answer.querySelector(".error")?.remove());
  form.addEventListener("keydown", (event) => {
    const isMessage = event.target.name === "prompt" && form.elements.mode?.value === "chat";
    if (event.key !== "Enter" || event.isComposing) return;
    if (!(event.ctrlKey || event.metaKey || (isMessage && !event.shiftKey))) return;
    event.preventDefault();
    form.requestSubmit();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return;
    running = new AbortController();
    submit.disabled = true;
    stop.hidden = false;
    // A screen reader reads the whole answer, not every piece of it.
    answer.setAttribute("aria-busy", "true");
    const start = performance.now();
    const milliseconds = () => Math.round(performance.now() - start);
    const elapsed = () => `${milliseconds()} ms`;
    // A text and a chat stay; the error of another request takes the place of its answer.
    const show = (node) => {
      if (form.dataset.box !== "generation") answer.replaceChildren();
      answer.append(node);
      answer.scrollTop = answer.scrollHeight;
    };
    answer.querySelector(".error")?.remove();
    try {
      const fields = await readFields(form);
      const streams = "streams" in form.dataset;
      const request = requestOf(requests, form, fields);
      await boxes[form.dataset.box]({ request, fields, form, answer, signal: running.signal, elapsed, milliseconds, streams });
    } catch (error) {
      if (error.name === "AbortError") show(note("stopped", elapsed()));
      else if (error instanceof Refused) show(element("p", "error", error.message));
      else if (error instanceof TypeError) show(element("p", "error", UNREACHABLE));
      else show(element("p", "error", `The gateway did not answer as expected: ${error.message}`));
    } finally {
      running = null;
      submit.disabled = false;
      stop.hidden = true;
      answer.removeAttribute("aria-busy");
    }
  });
  prepareCommand(form);
  form.hidden = false;
}

function addCopyButton(pre) {
  // Behind a proxy that speaks HTTPS, the gateway does not know its own address.
  const { url } = document.querySelector("main").dataset;
  pre.firstChild.textContent = pre.textContent.replaceAll(url, location.origin);
  const button = element("button", "", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(pre.textContent);
    } catch {
      // Without TLS, browsers have no clipboard except on localhost.
      getSelection().selectAllChildren(pre);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  pre.after(button);
}

// --- many systems ---------------------------------------------------------------------------------------------------------

function prepareIndex(filter) {
  const articles = Array.from(document.querySelectorAll("article"));
  const link = (article) => document.querySelector(`.index a[href="#${CSS.escape(article.dataset.system)}"]`);
  filter.addEventListener("input", () => {
    for (const article of articles) {
      const text = article.querySelector(".head").textContent.toLowerCase();
      article.hidden = link(article).hidden = !text.includes(filter.value.trim().toLowerCase());
    }
  });
  // On a narrow screen only the heads are shown, until one is opened.
  for (const article of articles) {
    const fold = element("button", "fold");
    const open = (isOpen) => {
      article.classList.toggle("folded", !isOpen);
      fold.setAttribute("aria-expanded", isOpen);
      fold.textContent = isOpen ? "Hide" : "Show";
    };
    fold.type = "button";
    fold.setAttribute("aria-label", `Details of ${article.dataset.system}`);
    fold.addEventListener("click", () => open(article.classList.contains("folded")));
    link(article).addEventListener("click", () => open(true));
    open(location.hash === `#${article.dataset.system}`);
    article.querySelector(".head").append(fold);
  }
  filter.hidden = false;
}

// --- fresh figures --------------------------------------------------------------------------------------------------------

// The systems, and those with a box: one that was not ready when the page was opened has none yet.
const systems = (page) => Array.from(page.querySelectorAll("[data-system]"), (node) => node.dataset.system).join(" ");
const boxed = (page) => Array.from(page.querySelectorAll("form[data-box]"), systemOf);

async function refresh() {
  if (document.hidden) return;
  const response = await fetch(address("/"), { headers: { Accept: "text/html" } });
  if (!response.ok) return;
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const known = boxed(document);
  document.getElementById("changed").hidden = systems(page) === systems(document) && boxed(page).every((name) => known.includes(name));
  for (const node of document.querySelectorAll("[data-live]")) {
    const fresh = page.querySelector(`[data-live="${CSS.escape(node.dataset.live)}"]`);
    if (fresh && fresh.innerHTML !== node.innerHTML) node.replaceChildren(...fresh.childNodes);
  }
}

document.querySelectorAll("form[data-box]").forEach(prepare);
document.querySelectorAll("pre").forEach(addCopyButton);
document.querySelectorAll("#filter").forEach(prepareIndex);
document.addEventListener("paste", paste);
// A gateway that is restarted, or refuses for a moment, answers the next time.
setInterval(() => refresh().catch(() => {}), REFRESH_MS);
