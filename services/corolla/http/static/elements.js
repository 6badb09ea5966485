// Elements of the page. Texts go in as texts and never as markup.

/** A new element with properties, attributes (`aria-…`, `data-…`, `role`), and children: elements or texts. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "role") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children);
  return made;
}

/** The element of the page with this id. */
export const byId = (id) => document.getElementById(id);

/** Makes the children of a list those of `items`, each by its key: those that stay are updated and keep their place. */
export function show(list, items, keyOf, make, update = () => {}) {
  const there = new Map(Array.from(list.children, (child) => [child.dataset.key, child]));
  let next = list.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = there.get(key);
    if (!child) {
      child = make(item);
      child.dataset.key = key;
    }
    there.delete(key);
    update(child, item);
    if (child === next) next = next.nextElementSibling;
    else list.insertBefore(child, next);
  }
  for (const gone of there.values()) gone.remove();
}
