// Choices to what is shown. They stand in the address too, so a view can be handed on as a link.
const form = document.getElementById("choices");
const find = document.getElementById("find");
const learnedOnly = document.getElementById("learned-only");
const edges = document.getElementById("edges");
const blanks = document.getElementById("blanks");
const count = document.getElementById("count");
const chosen = { roles: null, rules: new Set(), find: "" };

function option(name, value, text, amount) {
  const label = make("label", "option");
  const box = make("input", "");
  box.type = "checkbox";
  box.name = name;
  box.value = value;
  label.append(box, make("span", "", text), make("span", "amount", amount));
  return label;
}

function offer() {
  const tokens = new Map();
  for (const sample of samples) for (const s of sample.segments) tokens.set(s.role, (tokens.get(s.role) ?? 0) + s.stop - s.start);
  const roles = document.getElementById("roles");
  for (const role of data.roles) if (tokens.has(role)) roles.append(option("role", role, role, plural(tokens.get(role), "token")));
  const rules = new Map();
  for (const sample of samples) {
    for (const rule of new Set(sample.findings.map((number) => data.findings[number].rule))) rules.set(rule, (rules.get(rule) ?? 0) + 1);
  }
  const box = document.getElementById("rules");
  for (const [rule, amount] of [...rules].sort()) box.append(option("rule", rule, rule, grouped(amount)));
  box.hidden = rules.size === 0;
}

function boxes(name) { return [...form.querySelectorAll(`input[name="${name}"]`)]; }

function read() {
  const roles = boxes("role");
  const on = roles.filter((box) => box.checked);
  chosen.roles = on.length === roles.length ? null : new Set(on.map((box) => box.value));
  chosen.rules = new Set(boxes("rule").filter((box) => box.checked).map((box) => box.value));
  chosen.find = find.value.trim();
}

// "train.jsonl:18" or "18" is a source row; anything else is looked for in places and in the text.
function found(sample) {
  if (!chosen.find) return true;
  const wanted = chosen.find.toLowerCase();
  const place = sample.place.toLowerCase();
  if (/^\d+$/.test(wanted)) return place.endsWith(`:${wanted}`) || place.endsWith(`[${wanted}]`);
  return place === wanted || (!/(:\d+|\])$/.test(wanted) && place.includes(wanted)) || wordsOf(sample).includes(wanted) || sample.columns.some(([, value]) => value.toLowerCase().includes(wanted));
}

function wanted(segment) {
  return (chosen.roles === null || chosen.roles.has(segment.role)) && (!learnedOnly.checked || segment.learned > 0);
}

function passes(sample) {
  if (chosen.rules.size && !sample.findings.some((number) => chosen.rules.has(data.findings[number].rule))) return false;
  return sample.segments.some(wanted) && found(sample);
}

function refold(article, sample) {
  article.querySelectorAll(".turn").forEach((section, number) => fold(section, !wanted(sample.segments[number])));
}

function apply() {
  let shown = 0;
  samples.forEach((sample, number) => {
    const pass = passes(sample);
    cards[number].hidden = !pass;
    shown += pass;
    refold(cards[number], sample);
  });
  document.body.classList.toggle("edges", edges.checked);
  document.body.classList.toggle("no-blanks", !blanks.checked);
  count.textContent = shown === samples.length ? plural(shown, data.noun) : `${grouped(shown)} of ${plural(samples.length, data.noun)}`;
  document.getElementById("none").hidden = shown > 0;
}

function remember(extra) {
  const state = new URLSearchParams();
  if (chosen.roles !== null) state.set("role", [...chosen.roles].join(","));
  if (chosen.rules.size) state.set("rule", [...chosen.rules].join(","));
  if (chosen.find) state.set("find", chosen.find);
  if (learnedOnly.checked) state.set("learned", "1");
  if (edges.checked) state.set("edges", "1");
  if (!blanks.checked) state.set("blanks", "0");
  for (const [name, value] of Object.entries(extra ?? {})) state.set(name, value);
  const text = state.toString();
  history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
}

function recall() {
  const state = new URLSearchParams(location.hash.slice(1));
  const roles = state.get("role");
  for (const box of boxes("role")) box.checked = roles === null || roles.split(",").includes(box.value);
  for (const box of boxes("rule")) box.checked = (state.get("rule") ?? "").split(",").includes(box.value);
  find.value = state.get("find") ?? "";
  learnedOnly.checked = state.get("learned") === "1";
  edges.checked = state.get("edges") === "1";
  blanks.checked = state.get("blanks") !== "0";
  read();
  apply();
  if (state.has("sample")) goTo(Number(state.get("sample")), state.has("token") ? Number(state.get("token")) : null);
}

function everything() {
  history.replaceState(null, "", location.pathname + location.search);
  recall();
}
