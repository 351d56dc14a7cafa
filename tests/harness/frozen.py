"""Imported last by the fork server: what libraries have made is no garbage, and no collection in a fork looks at it.

A million objects, a third of a second each time; and pages that are looked at are copied.
"""

import gc

gc.collect()
gc.freeze()
