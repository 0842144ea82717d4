// Samples to cards. A card's tokens are only built when it comes near the window, so a large page opens at once.
const BLOCK = 2000; // tokens that are built in one go
const NEAR = "1200px";
const list = document.getElementById("list");

const near = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) entry.target.fill();
}, { rootMargin: NEAR });

function token(sample, t) {
  const element = make("span", "t");
  element.dataset.t = t;
  if (sample.marks[t]) element.classList.add("l");
  if (isSpecial(sample, t)) element.classList.add("sp");
  // Seen with the edges of tokens, and wherever a mask cuts a character in two.
  if (sample.inside.has(t)) element.append(make("span", `x part${sample.marks[t] !== sample.marks[t - 1] ? " odd" : ""}`, "⋯"));
  const picture = pictureAt(sample, t);
  if (picture !== null) element.append(picture);
  spell(element, textOf(sample, t));
  // An image is one piece: its first token.
  element.hidden = (imageAt(sample, t)?.[0] ?? t) !== t;
  return element;
}

// Ears get what eyes see: where learning begins and where it ends.
function build(sample, start, stop, from) {
  const built = document.createDocumentFragment();
  for (let t = start; t < stop; t++) {
    if (t === from || sample.marks[t] !== sample.marks[t - 1]) {
      built.append(make("span", "sr", sample.marks[t] ? " learned: " : " not learned: "));
    }
    built.append(token(sample, t));
  }
  return built;
}

function sizeOf(segment) {
  const size = segment.stop - segment.start;
  if (!segment.learned) return plural(size, "token");
  return segment.learned === size ? `all ${grouped(size)} learned` : `${grouped(segment.learned)} of ${grouped(size)} learned`;
}

function turn(sample, segment) {
  const section = make("section", "turn");
  section.dataset.role = segment.role;
  section.setAttribute("aria-label", segment.role);
  const head = make("button", "role");
  head.type = "button";
  head.setAttribute("aria-expanded", "true");
  head.append(make("span", "name", segment.role), make("span", "size", sizeOf(segment)));
  head.title = "Fold or unfold this turn";
  head.addEventListener("click", () => fold(section, !section.classList.contains("folded")));
  const text = make("div", "text");
  text.dir = "auto";
  section.append(head, text);
  for (let start = segment.start; start < segment.stop; start += BLOCK) {
    const block = make("span", "block");
    const stop = Math.min(start + BLOCK, segment.stop);
    block.fill = () => {
      block.fill = () => {};
      near.unobserve(block);
      block.style.minHeight = "";
      block.append(build(sample, start, stop, segment.start));
    };
    block.dataset.stop = stop;
    if (start > segment.start) {
      block.classList.add("later");
      near.observe(block);
    } else block.fill();
    text.append(block);
  }
  return section;
}

function fold(section, folded) {
  section.classList.toggle("folded", folded);
  section.querySelector(".role").setAttribute("aria-expanded", String(!folded));
}

// Where in the sample it is learned, at one look: tall stretches, so that shape tells it without colour.
function strip(sample) {
  const map = make("div", "strip");
  map.setAttribute("aria-hidden", "true");
  const stops = [];
  for (let r = 0; r < sample.learned.length; r += 2) {
    const [a, b] = [sample.learned[r], sample.learned[r + 1]].map((t) => `${((100 * t) / sample.size).toFixed(3)}%`);
    stops.push(`transparent ${a}, var(--learned-line) ${a}, var(--learned-line) ${b}, transparent ${b}`);
  }
  if (stops.length) map.style.backgroundImage = `linear-gradient(to right, ${stops.join(", ")})`;
  return map;
}

// A prompt's further fields, which its rewards are given.
function columns(sample) {
  const list = make("dl", "columns");
  for (const [name, value] of sample.columns) {
    const said = make("dd", "");
    spell(said, value);
    list.append(make("dt", "", name), said);
  }
  return list;
}

function card(sample) {
  const article = make("article", "card");
  article.id = `sample-${sample.index}`;
  article.tabIndex = 0;
  article.dataset.number = sample.number;
  const title = make("h3", "", sample.place);
  title.id = `title-${sample.index}`;
  article.setAttribute("aria-labelledby", title.id);
  const facts = make("p", "facts");
  const link = make("a", "anchor", `${data.noun} ${grouped(sample.index)}`);
  link.href = `#sample=${sample.index}`;
  const learned = data.noun === "prompt" ? "" : ` · ${grouped(sample.marked)} learned, ${share(sample.marked, sample.size)}`;
  facts.append(link, ` · ${plural(sample.size, "token")}${learned}`);
  const head = make("header", "");
  head.append(title);
  if (sample.standing) head.append(make("span", `badge ${sample.standing}`, sample.standing));
  if (sample.heldOut) head.append(make("span", "badge", "held out"));
  head.append(facts);
  if (sample.partner !== null && byIndex.has(sample.partner)) {
    const other = make("a", "anchor", byIndex.get(sample.partner).standing);
    other.href = `#sample=${sample.partner}`;
    facts.append(" · to the ", other);
  }
  article.append(head, strip(sample));
  for (const number of sample.findings) {
    const found = data.findings[number];
    const line = make("p", `finding ${found.severity}`);
    line.append(make("b", "", `${found.severity} `), make("code", "", found.rule), ` ${found.field}${found.field ? ": " : ""}${found.what}; ${found.fix}`);
    article.append(line);
    if (found.texts) {
      const both = make("div", "texts");
      for (const [number, name] of ["learned here", "as it will be asked"].entries()) {
        const side = make("figure", "");
        side.append(make("figcaption", "", name), make("pre", "", found.texts[number]));
        both.append(side);
      }
      article.append(both);
    }
  }
  const body = make("div", "body");
  body.style.minHeight = `${Math.min(2 + Math.ceil(sample.size / 18), 60) * 1.6}rem`;
  article.append(body);
  article.fill = () => {
    article.fill = () => {};
    near.unobserve(article);
    body.style.minHeight = "";
    body.append(...sample.segments.map((segment) => turn(sample, segment)));
    if (sample.columns.length) body.append(columns(sample));
    refold(article, sample);
  };
  near.observe(article);
  return article;
}

// Every block up to a token, so that it can be gone to.
function fillTo(article, t) {
  article.fill();
  for (const block of article.querySelectorAll(".block")) {
    block.fill();
    if (Number(block.dataset.stop) > t) break;
  }
  return article.querySelector(`[data-t="${t}"]`);
}

function fillAll() {
  for (const article of list.children) fillTo(article, Infinity);
}

const cards = samples.map(card);
