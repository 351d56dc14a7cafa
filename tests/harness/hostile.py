"""Names out of other people's programs that a browser may take for markup, and what it must not have made of them.

program = renamed(good, Random("playground 3"))        # can be made again from its number
...                                                    # a page of it is made, and opened in `browser`
assert injected(browser) == []
"""

from __future__ import annotations

from random import Random
from typing import Any

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
"""What is put in, before, behind or in place of a name. `ACT` must never run."""

LOOK = """(() => {
  const all = [...document.querySelectorAll('*')];
  const made = document.querySelectorAll('script:not([src="app.js"]), iframe, object, embed, base, animate');
  const leads = (name) => /^(xlink:)?(href|src|action)$/i.test(name);
  const bad = ({ name, value }) => /^on/i.test(name) || (leads(name) && /^\\s*javascript:/i.test(value));
  const said = (each) => [...each.attributes].filter(bad).map(({ name, value }) => `${each.tagName} ${name}=${value}`);
  return [...(window.ran ? ['script ran'] : []), ...[...made].map((each) => each.outerHTML.slice(0, 200)),
    ...all.flatMap(said)];
})()"""


SEEN = tuple(each for each in MARKUP if each.isprintable())


def name(rng: Random, old: str = "", markup: tuple[str, ...] = MARKUP) -> str:
    """A hostile name, with or without the words of an old one."""
    one = rng.choice(markup)
    return rng.choice((one, old + one, one + old, one + rng.choice(markup)))


def renamed(program: Program, rng: Random) -> Program:
    """`program` with other names of its units, stacks and visits; what had one name still has one. One program of five
    may have characters that are not seen."""
    new: dict[str, str] = {}
    markup = MARKUP if rng.random() < 0.2 else SEEN

    def of(old: Any) -> Any:
        return old if old is None else new.setdefault(old, name(rng, old, markup))

    trace = program.trace
    units = tuple(unit._replace(name=of(unit.name), stack=of(unit.stack)) for unit in trace.units)
    visits = tuple(visit._replace(name=of(visit.name)) for visit in trace.visits)
    return Program(trace._replace(units=units, visits=visits), *program.stages)


def injected(browser: Browser) -> list[str]:
    """Says what a page holds that none of ours does: handlers, scripts, frames. Empty where all is right."""
    return browser.evaluate(LOOK)
