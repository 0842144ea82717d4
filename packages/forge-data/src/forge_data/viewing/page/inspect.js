// A token to what is known of it, by pointer or by key.
const panel = document.getElementById("token");
const line = document.getElementById("token-line");
let at = null; // { article, sample, t }

function part(name, value, className) {
  const item = make("span", "part");
  item.append(make("span", "what", name), " ", make("span", className ?? "", value));
  return item;
}

function describe(sample, t) {
  const segment = sample.segments.find((s) => t >= s.start && t < s.stop);
  const shown = make("span", `t${sample.marks[t] ? " l" : ""}${isSpecial(sample, t) ? " sp" : ""}`);
  if (textOf(sample, t)) spell(shown, textOf(sample, t));
  else shown.append(make("span", "x part", "⋯"));
  const learned = !sample.marks[t] ? "not learned" : t === 0 ? "marked, but nothing stands before it: never counted" : "learned";
  line.replaceChildren(shown, part("", learned, "state"), part("token", `${t} of ${sample.size}`), part("id", String(idOf(sample, t))), part("turn", segment ? segment.role : ""));
  if (!isSpecial(sample, t)) line.append(part("bytes", bytesOf(sample, t).join(" "), "bytes"));
  if (sample.inside.has(t)) line.append(part("", "begins inside a character", "state"));
}

function select(article, t, { focus = false } = {}) {
  const sample = samples[Number(article.dataset.number)];
  t = imageAt(sample, t)?.[0] ?? t;
  const element = fillTo(article, t);
  if (!element) return;
  if (at) at.element.classList.remove("at");
  at = { article, sample, t, element };
  element.classList.add("at");
  const section = element.closest(".turn");
  if (section.classList.contains("folded")) fold(section, false);
  describe(sample, t);
  panel.hidden = false;
  if (focus) element.scrollIntoView({ block: "nearest" });
  remember({ sample: sample.index, token: t });
}

function unselect() {
  if (at) at.element.classList.remove("at");
  at = null;
  panel.hidden = true;
  remember();
}

function goTo(index, t) {
  const sample = byIndex.get(index);
  if (!sample) return;
  const article = cards[sample.number];
  article.hidden = false;
  article.fill();
  if (t !== null && t >= 0 && t < sample.size) select(article, t);
  article.focus({ preventScroll: true });
  (t !== null && at ? at.element : article).scrollIntoView({ block: t !== null && at ? "center" : "start" });
}

function step(article, by) {
  const shown = cards.filter((one) => !one.hidden);
  const next = shown[shown.indexOf(article) + by];
  if (!next) return;
  next.fill();
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "start" });
}

function edge(sample, t, by) {
  for (let next = t + by; next >= 0 && next < sample.size; next += by) {
    if (sample.marks[next] !== (next > 0 ? sample.marks[next - 1] : 0)) return next;
  }
  return t;
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "Escape" && at) return unselect();
  if (typing) return;
  if (event.key === "/") {
    event.preventDefault();
    document.getElementById("filters").open = true;
    find.focus();
    return;
  }
  const article = event.target.closest(".card") ?? (at ? at.article : null);
  if (event.key === "j" || event.key === "k") {
    if (article) step(article, event.key === "j" ? 1 : -1);
    else step(null, 1);
    return;
  }
  if (!article) return;
  const sample = samples[Number(article.dataset.number)];
  const here = at && at.article === article ? at.t : -1;
  const next = { ArrowRight: imageAt(sample, here)?.[1] ?? here + 1, ArrowLeft: here - 1, n: edge(sample, here, 1), p: edge(sample, Math.max(here, 0), -1) }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  if (sample.size) select(article, Math.min(Math.max(next, 0), sample.size - 1), { focus: true });
}

// A link to a sample goes there and leaves the choices as they are; opened elsewhere, it is an address like any other.
function follow(event, link) {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const index = Number(new URLSearchParams(link.hash.slice(1)).get("sample"));
  goTo(index, null);
  remember({ sample: index });
}

function onClick(event) {
  const link = event.target.closest("a.anchor");
  if (link) return follow(event, link);
  const element = event.target.closest("[data-t]");
  if (element) select(element.closest(".card"), Number(element.dataset.t));
}
