// The page's data to samples that know their tokens. All text below is hostile until proven otherwise: it only ever
// becomes text nodes.
const data = JSON.parse(document.getElementById("data").textContent);
const INVISIBLE = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Z}]/gu;
const encoder = new TextEncoder();
const grouped = new Intl.NumberFormat("en").format;

const samples = data.samples.map((raw, number) => {
  const size = raw.tokens.length;
  const learned = new Uint8Array(size);
  for (let r = 0; r < raw.learned.length; r += 2) learned.fill(1, raw.learned[r], raw.learned[r + 1]);
  const segments = [];
  for (let s = 0; s < raw.segments.length; s += 2) {
    const start = raw.segments[s];
    const stop = s + 2 < raw.segments.length ? raw.segments[s + 2] : size;
    let count = 0;
    for (let t = start; t < stop; t++) count += learned[t];
    segments.push({ start, stop, role: data.roles[raw.segments[s + 1]], learned: count });
  }
  const marked = segments.reduce((sum, segment) => sum + segment.learned, 0);
  return { ...raw, number, size, marks: learned, marked, segments, inside: new Set(raw.inside), words: null };
});

const byIndex = new Map(samples.map((sample) => [sample.index, sample]));

function idOf(sample, t) { return data.vocabulary[sample.tokens[t]][0]; }
function isSpecial(sample, t) { return data.vocabulary[sample.tokens[t]][2] === 1 || imageAt(sample, t) !== null; }
// The first and the last token + 1 of the image that a token stands for; null for a token of text.
function imageAt(sample, t) {
  for (let i = 0; i < sample.images.length; i += 2) {
    if (t >= sample.images[i] && t < sample.images[i + 1]) return [sample.images[i], sample.images[i + 1], sample.pictures[i / 2]];
  }
  return null;
}
// A small picture of the image that a token is the first of; null for others, and where its file is not there as it was.
function pictureAt(sample, t) {
  const image = imageAt(sample, t);
  if (image === null || image[0] !== t || image[2] < 0) return null;
  const picture = make("img", "picture");
  picture.src = data.pictures[image[2]];
  picture.alt = "";
  return picture;
}
function textOf(sample, t) { return sample.shared[t] ?? data.vocabulary[sample.tokens[t]][1]; }

// What the token itself adds to the text, byte by byte, even where a character is spread over several tokens.
function bytesOf(sample, t) {
  const bytes = [];
  for (const letter of data.vocabulary[sample.tokens[t]][1]) {
    const code = letter.codePointAt(0);
    if (code >= 0xdc80 && code <= 0xdcff) bytes.push(code & 0xff);
    else bytes.push(...encoder.encode(letter));
  }
  return bytes.map((byte) => byte.toString(16).toUpperCase().padStart(2, "0"));
}

function wordsOf(sample) {
  if (sample.words === null) sample.words = sample.tokens.map((_, t) => textOf(sample, t)).join("").toLowerCase();
  return sample.words;
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function plural(count, noun) { return `${grouped(count)} ${noun}${count === 1 ? "" : "s"}`; }

function share(part, whole) {
  if (!whole) return "0 %";
  const percent = (100 * part) / whole;
  return `${percent > 0 && percent < 1 ? "<1" : percent > 99 && percent < 100 ? ">99" : Math.round(percent)} %`;
}

// Puts text into an element, with a mark for whatever would not show.
function spell(element, text) {
  let done = 0;
  for (const match of text.matchAll(INVISIBLE)) {
    if (match.index > done) element.append(text.slice(done, match.index));
    done = match.index + match[0].length;
    const code = match[0].codePointAt(0);
    if (code === 0x20) element.append(make("span", "w", " "));
    else if (code === 0x0a) element.append(make("span", "n", "↵"), "\n");
    else if (code === 0x09) element.append(make("span", "n", "⇥"), "\t");
    else if (code >= 0xdc80 && code <= 0xdcff) element.append(make("span", "x", (code & 0xff).toString(16).toUpperCase()));
    else element.append(make("span", "x", "U+" + code.toString(16).toUpperCase().padStart(4, "0")));
  }
  if (done < text.length) element.append(text.slice(done));
}
