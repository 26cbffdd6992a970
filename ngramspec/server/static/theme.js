// Puts the chosen colours on before the first paint. Without a choice, the system's hold.
try {
  const chosen = localStorage.getItem("ngramspec.theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch {
  // storage is switched off: nothing was chosen
}
