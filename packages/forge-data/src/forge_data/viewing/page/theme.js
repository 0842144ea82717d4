// The button that turns a page from light to dark and back; without it the page follows the system.
const theme = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
function isDark() { return (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark"; }
function nameTheme() { theme.textContent = isDark() ? "Light" : "Dark"; dispatchEvent(new Event("theme")); }
theme.addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); });
dark.addEventListener("change", nameTheme);
theme.hidden = false;
nameTheme();
