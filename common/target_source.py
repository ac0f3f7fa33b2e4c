"""Where a target comes from, and under what name it is recorded. Light to import."""

import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from typer import Option

# Of every command that loads a target.
TargetRevision = Annotated[
    str | None,
    Option(help="Revision of the target on the Hub. Default: the one that the drafter was made for, else main."),
]
TrustRemoteCode = Annotated[
    bool,
    Option("--trust-remote-code", help="Run the code that the target's repository or folder brings; read it before."),
]
TargetName = Annotated[
    str | None, Option(help="Hub id to record for the target, where --target is a local copy of it.")
]
SNAPSHOT = re.compile(r"models--(?P<id>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")


@dataclass(frozen=True)
class TargetSource:
    """A repository or folder of a target.

    Args:
        path: id on the Hub, or a folder.
        revision: of the repository; None for its main branch.
        trust_remote_code: whether code that it brings may run.
        name: what is recorded of it, where that is not `path`: the Hub id of a local copy.
    """

    path: str
    revision: str | None = None
    trust_remote_code: bool = False
    name: str | None = None

    @classmethod
    def of(cls, target: "str | TargetSource") -> "TargetSource":
        return target if isinstance(target, cls) else cls(str(target))

    @property
    def is_local(self) -> bool:
        return Path(self.path).exists()

    @property
    def recorded_name(self) -> str:
        """What a drafter records of its target: a folder's path means nothing elsewhere, its name may.

        A folder in the cache of the Hub has the name of its repository.
        """
        if self.name is not None or not self.is_local:
            return self.name or self.path
        cached = self._cached()
        return Path(self.path).resolve().name if cached is None else cached["id"].replace("--", "/")

    @property
    def recorded_revision(self) -> str | None:
        """The revision as it was asked for; of a folder in the cache of the Hub its commit."""
        cached = self._cached()
        return self.revision if cached is None else cached["commit"]

    def _cached(self) -> re.Match | None:
        return SNAPSHOT.search(Path(self.path).absolute().as_posix()) if self.is_local else None

    def recorded_over(self, name: str | None, revision: str | None) -> tuple[str, str | None]:
        """What to record where a drafter says `name` and `revision`, which a local copy without a name of its own keeps."""
        if name is not None and self.is_local and self.name is None and self._cached() is None:
            return name, revision
        if self.recorded_name == name:
            return name, self.recorded_revision or revision
        return self.recorded_name, self.recorded_revision

    def for_drafter(self, config) -> "TargetSource":
        """Return the target at the revision that a drafter's config records, unless another is asked for; a difference is said."""
        made_for = config.target_revision
        if made_for is None or self.recorded_name != config.target_name_or_path:
            return self
        if self.revision is None and not self.is_local:
            return replace(self, revision=made_for)
        if (here := self.recorded_revision) not in (None, made_for):
            print(
                f"the drafter was made for revision {made_for} of {self.recorded_name}, this is {here}: where its weights are others, "
                "fewer draft tokens are accepted.",
                file=sys.stderr,
            )
        return self

    def options(self) -> str:
        """Spell the source as options of a command."""
        words = ["--target", self.path]
        words += ["--target-revision", self.revision] if self.revision else []
        return shlex.join(words + ["--trust-remote-code"] * self.trust_remote_code)

    # ---- what is loaded from it

    def config(self):
        from transformers import AutoConfig

        return self._load(AutoConfig)

    def tokenizer(self):
        from transformers import AutoTokenizer

        return self._load(AutoTokenizer)

    def model(self, **arguments):
        from transformers import AutoModelForCausalLM

        return self._load(AutoModelForCausalLM, **arguments)

    def _load(self, auto, **arguments):
        """Load with an Auto class, which must not stop to ask whether code may run.

        Raises:
            ValueError: the target brings code of its own, and it is not trusted.
        """
        try:
            return auto.from_pretrained(
                self.path, revision=self.revision, trust_remote_code=self.trust_remote_code, **arguments
            )
        except ValueError as error:
            if self.trust_remote_code or "trust_remote_code" not in str(error):
                raise
            raise ValueError(
                f"{self.path} brings code of its own, which runs only on demand. Read it there; to run it, pass --trust-remote-code "
                "(and --target-revision COMMIT, so that it stays what you have read)."
            ) from None
