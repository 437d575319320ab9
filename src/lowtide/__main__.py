"""``python -m lowtide`` is the `lowtide` command."""

from .cli import main

raise SystemExit(main())
