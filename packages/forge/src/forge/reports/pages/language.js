// Chromium under LANG=C names a language that Intl refuses ("en-US@posix"), at which uPlot would end.
try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en" });
}
