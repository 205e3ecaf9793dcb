// How the answer of each kind of pipeline is drawn. An image of an answer becomes pixels of a canvas.
"use strict";

const AREAS = 64; // of an image, at most

function readJson(text, label) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Refused(`${label}: this is not JSON.`);
  }
}

function table(text) {
  // Comma-separated values become columns by name. JSON stays as it is.
  if (/^\s*[[{]/.test(text)) return readJson(text, "Table");
  const cells = (line) => Array.from(`,${line}`.matchAll(/,\s*(?:"((?:[^"]|"")*)"|([^,]*))/g), ([, quoted, plain]) =>
    (quoted?.replaceAll('""', '"') ?? plain).trim());
  const [names, ...rows] = lines(text).map(cells);
  return Object.fromEntries(names.map((name, i) => [name, rows.map((row) => row[i] ?? "")]));
}

async function canvasOf(base64, label) {
  const image = new Image();
  // The browser finds the format in the file itself.
  image.src = `data:image/png;base64,${base64}`;
  await image.decode();
  const canvas = element("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", label);
  canvas.getContext("2d").drawImage(image, 0, 0);
  return canvas;
}

// The golden angle keeps the hues of neighbours apart.
const hue = (i) => (i * 137.5 + 210) % 360;

function coloured(rows, colours) {
  const list = bars(rows);
  list[0].querySelectorAll(".label").forEach((label, i) => {
    const swatch = element("span", "swatch");
    swatch.style.background = colours[i];
    label.prepend(swatch);
  });
  return list;
}

const scored = (label, score) => ({ label, value: typeof score === "number" ? rounded(score) : "", share: score ?? 0 });

function ranked(answer) {
  // Pipelines name the label and its score in several ways; a list may be in another one, of one row.
  if (answer.labels) return answer.labels.map((label, i) => scored(label, answer.scores[i]));
  const list = [answer].flat(2);
  return list.map((one) => scored(String(one.label ?? one.token_str ?? one.answer ?? JSON.stringify(one)), one.score));
}

const drawings = {
  labels: (answer) => bars(ranked(answer)),

  async boxes(answer, { image }) {
    const names = [...new Set(answer.map((one) => one.label))];
    const colours = answer.map((one) => `hsl(${hue(names.indexOf(one.label))} 75% 38%)`);
    const canvas = await canvasOf(image, "The image, with a box around each object");
    const figure = element("div", "picture boxes", canvas);
    answer.forEach(({ label, box }, i) => {
      const node = element("div", "box", element("span", "", label));
      const share = (length, side) => `${100 * length / side}%`;
      node.style.left = share(box.xmin, canvas.width);
      node.style.top = share(box.ymin, canvas.height);
      node.style.width = share(box.xmax - box.xmin, canvas.width);
      node.style.height = share(box.ymax - box.ymin, canvas.height);
      node.style.borderColor = node.firstChild.style.background = colours[i];
      figure.append(node);
    });
    return [figure, ...coloured(ranked(answer), colours)];
  },

  async masks(answer, { image }) {
    const areas = (answer.masks ?? answer).slice(0, AREAS).map((one, i) => (
      answer.masks ? { mask: one, label: `area ${i + 1}`, score: answer.scores?.[i] } : one));
    const canvas = await canvasOf(image, "The image, with its areas in colours");
    const overlay = element("canvas");
    overlay.setAttribute("aria-hidden", "true");
    [overlay.width, overlay.height] = [canvas.width, canvas.height];
    const context = overlay.getContext("2d");
    const colours = areas.map((_, i) => `hsl(${hue(i)} 75% 50%)`);
    for (const [i, { mask, label }] of areas.entries()) {
      const area = await canvasOf(mask, label);
      const own = area.getContext("2d");
      const pixels = own.getImageData(0, 0, area.width, area.height);
      // The brightness of a mask is how much of the colour shows.
      for (let at = 0; at < pixels.data.length; at += 4) pixels.data[at + 3] = pixels.data[at];
      own.putImageData(pixels, 0, 0);
      own.globalCompositeOperation = "source-in";
      own.fillStyle = colours[i];
      own.fillRect(0, 0, area.width, area.height);
      context.drawImage(area, 0, 0, overlay.width, overlay.height);
    }
    const rows = areas.map(({ label, score }) => scored(label, score));
    return [element("div", "picture", canvas, overlay), ...coloured(rows, colours)];
  },

  async depth({ depth }) {
    return [element("div", "picture", await canvasOf(depth, "The depth of the image"))];
  },

  text(answer) {
    return [answer].flat(2).map((one) => {
      const text = one.text ?? one.generated_text ?? one.translation_text ?? one.summary_text;
      // A chat ends with the message of the model.
      return element("p", "text", Array.isArray(text) ? String(text.at(-1)?.content ?? "") : String(text ?? JSON.stringify(one)));
    });
  },

  entities(answer, { text }) {
    const spans = [answer].flat(2).map((one) => ({ ...one, label: one.entity_group ?? one.entity }));
    return [marked(text, spans), ...(spans.length ? [] : [note("nothing recognized")])];
  },

  table(answer, { table: text }) {
    const { answer: words, coordinates = [], aggregator } = [answer].flat()[0];
    const found = new Set(coordinates.map(String));
    const rows = JSON.parse(text);
    const names = Object.keys(Array.isArray(rows) ? rows[0] ?? {} : rows);
    const cell = (i, name) => (Array.isArray(rows) ? rows[i][name] : rows[name][i]);
    const count = Array.isArray(rows) ? rows.length : rows[names[0]].length;
    const row = (tag, cells) => element("tr", "", ...cells.map(([value, name]) => element(tag, name, String(value))));
    const body = Array.from({ length: count }, (_, i) =>
      row("td", names.map((name, j) => [cell(i, name), found.has(`${i},${j}`) ? "found" : ""])));
    const head = element("thead", "", row("th", names.map((name) => [name, ""])));
    const shown = element("div", "scroll", element("table", "", head, element("tbody", "", ...body)));
    return [element("p", "text", String(words)), shown, ...(aggregator ? [note(`aggregation: ${aggregator}`)] : [])];
  },

  sound(answer) {
    return [answer].flat().map(({ audio }) => {
      const player = element("audio");
      player.controls = true;
      player.setAttribute("aria-label", "The sound of the answer");
      player.src = `data:audio/wav;base64,${audio}`;
      return player;
    });
  },

  json: (answer) => [element("p", "text", JSON.stringify(answer, null, 1).slice(0, 20000))],
};

async function drawn(kind, answer, fields) {
  // An answer of another form than expected, or an image that only the server can read, is shown as JSON.
  try {
    const nodes = await drawings[kind](answer, fields);
    if (Array.isArray(answer) && !answer.length) nodes.push(note("nothing found"));
    return nodes;
  } catch {
    return drawings.json(answer);
  }
}
