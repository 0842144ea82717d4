// Everything together, once.
offer();
list.append(...cards);
for (const element of document.querySelectorAll(".needs-script")) element.hidden = false;
const narrow = matchMedia("(max-width: 63.99rem)");
document.getElementById("filters").open = !narrow.matches;
narrow.addEventListener("change", () => { document.getElementById("filters").open = !narrow.matches; });

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", () => { read(); apply(); remember(); });
form.addEventListener("reset", (event) => { event.preventDefault(); everything(); });
document.getElementById("all").addEventListener("click", everything);
addEventListener("hashchange", recall);
// A row that a finding names is shown by the filter for it, further down the page.
document.querySelector(".books").addEventListener("click", (event) => {
  if (event.target.closest("a")) setTimeout(() => document.getElementById("samples").scrollIntoView());
});
addEventListener("beforeprint", fillAll);
document.addEventListener("keydown", onKey);
list.addEventListener("click", onClick);
document.getElementById("token-close").addEventListener("click", unselect);

recall();
