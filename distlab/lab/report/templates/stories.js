// Marks the lines of all ranks on the same event as the line under the pointer.
document.querySelectorAll(".stories").forEach((stories) => {
  const lines = [...stories.querySelectorAll("li[data-key]")];
  const mark = (key) => lines.forEach((line) => line.classList.toggle("same", line.dataset.key === key));
  stories.addEventListener("pointerover", (event) => mark(event.target.closest("li")?.dataset.key));
  stories.addEventListener("pointerleave", () => mark(undefined));
});
