// Sorts a table by the column whose heading is pressed, and hides the rows that do not hold the words of its filter.
// Without scripts the tables are complete and in layer order.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    heading.replaceChildren(button);
    button.addEventListener("click", () => sort(column));
  });

  function key(row, column) {
    const cell = row.cells[column];
    return cell.dataset.sort ?? cell.textContent.trim();
  }

  function sort(column) {
    const down = headings[column].getAttribute("aria-sort") === "ascending";
    headings.forEach((heading) => heading.removeAttribute("aria-sort"));
    headings[column].setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows];
    // Rows without a value stay last in both directions.
    const empty = (text) => text === "" || text === "–";
    rows.sort((a, b) => {
      const [x, y] = [key(a, column), key(b, column)];
      if (empty(x) || empty(y)) return empty(x) - empty(y);
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
      return down ? -order : order;
    });
    body.append(...rows);
  }

  const filter = document.querySelector(`[data-filters="${table.id}"]`);
  if (!filter) continue;
  filter.hidden = false;
  const [input, count] = [filter.querySelector("input"), filter.querySelector("output")];
  const apply = () => {
    const words = input.value.toLowerCase().split(/\s+/);
    let shown = 0;
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${body.rows.length}`;
  };
  input.addEventListener("input", apply);
  apply();
}
