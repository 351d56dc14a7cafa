"""Names out of other people's programs that a browser may take for markup, and what it must not have made of them.

for word in MARKUP:
    program = renamed(good, word)
    ...                                 # a page of it is made, and opened in `browser`
    assert injected(browser) == []
"""

from __future__ import annotations

from tests.harness.browser import Browser
from yafsdp_fn.program.program import Program

ACT = "window.ran=1"
MARKUP = (
    f"<script>{ACT}</script>",
    f"<img src=x onerror={ACT}>",
    f"<svg onload={ACT}>",
    f"<a href=javascript:{ACT}>x</a>",
    f'" onmouseover="{ACT}',
    f"' onmouseover='{ACT}",
    f'"><img src=x onerror={ACT}>',
    f"'><svg/onload='{ACT}'>",
    f'" autofocus tabindex=0 onfocus={ACT} x="',
    f"` onmouseover=`{ACT}",
    f'"/><rect onclick="{ACT}"/><rect x="',
    *(f"</{tag}><script>{ACT}</script>" for tag in ("title", "style", "pre", "text", "textarea", "details", "code")),
    f"--><script>{ACT}</script><!--",
    f"]]><script>{ACT}</script>",
    f"<![CDATA[<img src=x onerror={ACT}>]]>",
    "<iframe srcdoc='<script>parent.ran=1</script>'>",
    f"<svg><animate onbegin={ACT} attributeName=x>",
    f"[x](javascript:{ACT})",
    f"![x](x){{: onerror={ACT} }}",
    f"\n\n<img src=x onerror={ACT}>\n\n",
    "```\n\n<b>",
    f"&lt;script&gt;{ACT}&lt;/script&gt;",
    f"&quot; onclick=&quot;{ACT}",
    f"${{{ACT}}}",
    f"{{{{{ACT}}}}}",
    "{% x %}",
    "%TABLE%",
    "$\\frac{$",
    "$a$",
    "__proto__",
    "constructor",
    "\u202e\u2028",
    "\x00\x02\x03",
    "\r\r# x",
    "",
    "x" * 5000,
)
"""What is put around a name, or in its place. `ACT` must never run."""

LOOK = """(() => {
  const all = [...document.querySelectorAll('*')];
  const made = document.querySelectorAll('script:not([src="app.js"]), iframe, object, embed, base, animate');
  const leads = (name) => /^(xlink:)?(href|src|action)$/i.test(name);
  const bad = ({ name, value }) => /^on/i.test(name) || (leads(name) && /^\\s*javascript:/i.test(value));
  const said = (each) => [...each.attributes].filter(bad).map(({ name, value }) => `${each.tagName} ${name}=${value}`);
  return [...(window.ran ? ['script ran'] : []), ...[...made].map((each) => each.outerHTML.slice(0, 200)),
    ...all.flatMap(said)];
})()"""


def renamed(program: Program, word: str) -> Program:
    """`program` with other names of its units, stacks and visits: one is `word`, the others have it on both sides."""
    new: dict[str | None, str] = {}

    def of(old: str | None) -> str | None:
        if old is not None and old not in new:
            new[old] = f"{word}{old}{word}" if new else word
        return new.get(old)

    trace = program.trace
    units = tuple(unit._replace(name=of(unit.name), stack=of(unit.stack)) for unit in trace.units)
    visits = tuple(visit._replace(name=of(visit.name)) for visit in trace.visits)
    return Program(trace._replace(units=units, visits=visits), *program.stages)


def injected(browser: Browser) -> list[str]:
    """Says what a page holds that none of ours does: handlers, scripts, frames. Empty where all is right."""
    return browser.evaluate(LOOK)
