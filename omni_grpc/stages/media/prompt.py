"""Which media a prompt holds, and what may be done with them."""

from __future__ import annotations

from omni_grpc.config import MediaPolicy
from omni_grpc.errors import InvalidField
from omni_grpc.ipc import StageSpec
from omni_grpc.types import Media, Messages, Prompt


def media_policy(spec: StageSpec) -> MediaPolicy:
    """The server's policy, as it reached the replica."""
    return MediaPolicy.model_validate(spec.media)


def prompt_media(prompt: Prompt, policy: MediaPolicy) -> list[tuple[str, Media]]:
    """The prompt's media with their paths, in order. Raises InvalidField if they are too many."""
    found = [(f"prompt.media[{place}]", item) for place, item in enumerate(prompt.media)]
    if isinstance(prompt.content, Messages):
        found += [
            (f"prompt.messages.messages[{turn}].parts[{place}].media", part)
            for turn, message in enumerate(prompt.content.messages)
            for place, part in enumerate(message.parts)
            if isinstance(part, Media)
        ]
    if len(found) > policy.max_items:
        raise InvalidField("prompt.media", f"has {len(found)} items, more than {policy.max_items}")
    return found
