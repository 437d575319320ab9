"""``lowtide generate``: answers of a model, with each of its adapters."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from ..core import ConfigError, DataError, OutputError, format_bytes, shortened
from ._answers import (
    add_model_arguments,
    add_template_argument,
    chat_template,
    check_adapters,
    check_named,
    end_tokens,
    open_named,
    with_each,
)
from ._chat import messages_to_ids
from ._console import errors
from ._explain import positive

_MOST_PROMPTS_BYTES = 1024**3


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="let a model continue prompts",
        description="Continue prompts with a model of Hugging Face's layout, several at once, and with each of several "
        "adapters on one base. A single answer is printed as it comes.",
    )
    add_model_arguments(parser)
    add_template_argument(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="one prompt")
    source.add_argument(
        "--prompts",
        metavar="FILE",
        help='a prompt a line of a .txt file, or an object a line of a .jsonl file with "prompt" or "messages" (and '
        '"tools")',
    )
    source.add_argument("--chat", action="store_true", help="talk, by the model's chat template; an empty line ends it")
    parser.add_argument(
        "--system", metavar="TEXT", help="system prompt of conversations that have none (default: the template's)"
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that ends an answer and is not part of it; again for another (default: none)",
    )
    parser.add_argument(
        "--max-new-tokens", type=positive, default=128, metavar="N", help="most tokens of an answer (default: 128)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="divides the logits; 0: the most likely token (default: 0.8)"
    )
    parser.add_argument("--top-p", type=float, default=1.0, help="of the most likely tokens, so much (default: 1.0)")
    parser.add_argument("--top-k", type=int, default=0, help="only so many of the most likely (default: 0, all)")
    parser.add_argument("--min-p", type=float, default=0.0, help="least share of the most likely's (default: 0.0)")
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="makes tokens so far less likely (default: 1.0)"
    )
    parser.add_argument(
        "--num-samples", type=positive, default=1, metavar="N", help="answers to each prompt (default: 1)"
    )
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="answers at once (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default: 0)")
    parser.add_argument("--output", metavar="FILE", help="write an object a line to a new .jsonl file (default: print)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    check_named(args)
    if args.chat and (args.output or args.num_samples > 1 or len(args.adapter) > 1):
        raise ConfigError(
            "--chat is one conversation", hint="leave out --output, --num-samples and all adapters but one"
        )
    if "" in args.stop:
        raise ConfigError("--stop is empty", hint="leave --stop out, or look whether a variable is unset")
    named = {} if args.chat else _prompts(args)
    prompts = [*named.values()]
    console = errors()  # answers alone are on standard output
    with _writer(args.output) as file:
        from ..models import Sampling

        fields = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        sampling = Sampling(**{name: getattr(args, name) for name in fields})
        base, tokenizer = open_named(args, console)
        check_adapters(base, args.adapter)
        if args.chat:
            _chat(args, base, tokenizer, sampling)
            return 0
        ids = _all_ids(args, base, tokenizer, named)
        _say_plan(console, args, base, ids)
        _say_text_is_no_question(console, args, prompts)
        _answer_all(console, args, base, tokenizer, sampling, prompts, ids, file)
    return 0


def _models(base: Any, adapters: Sequence[str]) -> Iterator[tuple[str | None, Any]]:
    """As `with_each`; a GPU gets layers apart where the base is used once, and then is gone."""
    import jax

    from ..models import unstack

    apart = jax.default_backend() == "gpu" and len(adapters) <= 1
    for name, model in with_each(base, adapters):
        yield name, unstack(model, donate=True) if apart else model


def _answer_all(
    console: Console,
    args: argparse.Namespace,
    base: Any,
    tokenizer: Any,
    sampling: Any,
    prompts: list[dict[str, Any]],
    ids: list[list[int]],
    file: TextIO | None,
) -> None:
    import jax

    from ..finetune import decode_after
    from ..models import generate_batch, stream

    key, ends = jax.random.key(args.seed), end_tokens(args, base, tokenizer).answer
    num_answers = len(prompts) * args.num_samples * max(len(args.adapter), 1)
    if file is None and num_answers == 1:
        for _, model in _models(base, args.adapter):
            answer = partial(stream, model)
            _stream(args, answer, tokenizer, sampling, ids[0], ends, console, _context(prompts[0], ids[0]))
        return
    done = num_tokens = 0
    start = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
            task = progress.add_task("generating", total=num_answers)
            for adapter, model in _models(base, args.adapter):
                for answer in generate_batch(
                    model,
                    ids,
                    args.max_new_tokens,
                    key=key,
                    sampling=sampling,
                    end_tokens=ends,
                    num_samples=args.num_samples,
                    batch_size=args.batch_size,
                ):
                    context = _context(prompts[answer.prompt], ids[answer.prompt])
                    text, is_cut = _cut(decode_after(tokenizer, context, answer.tokens), args.stop)
                    record = {**prompts[answer.prompt], "adapter": adapter, "sample": answer.sample, "text": text}
                    ended = answer.is_ended or is_cut
                    _hand_out(file, {**record, "num_tokens": len(answer.tokens), "ended": ended})
                    done, num_tokens = done + 1, num_tokens + len(answer.tokens)
                    rate = num_tokens / (time.monotonic() - start)
                    progress.update(task, completed=done, description=f"generating  {rate:,.0f} tokens/s")
    finally:
        seconds = max(time.monotonic() - start, 1e-9)
        where = f" in {args.output}" if args.output else ""
        console.print(
            f"{done:,} of {num_answers:,} answers{where}, {num_tokens:,} tokens in {seconds:.1f} s "
            f"({num_tokens / seconds:,.0f} tokens/s, compilation included)",
            markup=False,
        )


def _hand_out(file: TextIO | None, record: dict[str, Any]) -> None:
    if file is not None:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()  # what an interrupt, or a kill, leaves is whole lines
        return
    console = Console(highlight=False, soft_wrap=True)
    # A prompt is continued; a question is answered below it.
    prompt = record["prompt"] if "prompt" in record else (record["messages"][-1].get("content") or "") + "\n"
    names = [record["adapter"], f"sample {record['sample']}" if record["sample"] else None]
    if label := ", ".join(filter(None, names)):
        console.print(Text(label, style="bold"))
    console.print(Text(prompt, style="dim") + Text(record["text"]))
    console.rule()


def _context(record: dict[str, Any], ids: list[int]) -> list[int]:
    """Return the tokens that an answer continues. A question has none: a template precedes its answer."""
    return ids if "prompt" in record else []


def _cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first of some texts that end it, and whether one of them is there."""
    end = min((at for at in map(text.find, stops) if at >= 0), default=None)
    return text[:end], end is not None


def _begun(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of a text may begin a text that ends it."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def _stream(
    args: argparse.Namespace,
    answer: Callable[..., Iterator[int]],
    tokenizer: Any,
    sampling: Any,
    ids: list[int],
    ends: Sequence[int],
    console: Console,
    context: list[int],
) -> str:
    """Print one answer as it comes, and return it."""
    import jax
    from tokenizers.decoders import DecodeStream

    from ..finetune import decode_after

    decode: Any = DecodeStream(ids=context, skip_special_tokens=True)
    text, printed, ids_so_far = "", "", list[int]()
    start = time.monotonic()
    key = jax.random.key(args.seed)
    for token in answer(ids, args.max_new_tokens, key=key, sampling=sampling, end_tokens=ends):
        ids_so_far.append(token)
        text += decode.step(tokenizer, token) or ""
        ready, is_cut = _cut(text, args.stop)
        ready = ready[: len(ready) - (0 if is_cut else _begun(ready, args.stop))]
        sys.stdout.write(ready.removeprefix(printed))
        sys.stdout.flush()
        printed = ready
        if is_cut:
            break
    whole, _ = _cut(decode_after(tokenizer, context, ids_so_far), args.stop)
    # What is held back: a character, or a text that ends the answer, that never became whole.
    sys.stdout.write(whole.removeprefix(printed) + "\n" if whole.startswith(printed) else "\n")
    sys.stdout.flush()
    seconds = max(time.monotonic() - start, 1e-9)
    rate = f"{len(ids_so_far) / seconds:,.0f} tokens/s, compilation included"
    console.print(f"{len(ids_so_far)} tokens in {seconds:.1f} s ({rate})", style="dim", markup=False)
    return whole


def _chat(args: argparse.Namespace, base: Any, tokenizer: Any, sampling: Any) -> None:
    from ..finetune import check_ids
    from ..models import Conversation

    ((_, model),) = _models(base, args.adapter)
    ends, messages = end_tokens(args, model, tokenizer).answer, _system(args)
    conversation = Conversation(model)
    while text := _asked():
        messages.append({"role": "user", "content": text})
        (ids,) = messages_to_ids(args, tokenizer, {"the conversation": messages})
        check_ids(ids, tokenizer, base.config.vocab_size, "the conversation")
        answer = _stream(args, conversation.stream, tokenizer, sampling, ids, ends, errors(), [])
        messages.append({"role": "assistant", "content": answer})


def _system(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [] if args.system is None else [{"role": "system", "content": args.system}]


def _asked() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _all_ids(
    args: argparse.Namespace, base: Any, tokenizer: Any, prompts: dict[str, dict[str, Any]]
) -> list[list[int]]:
    """Tokenise prompts; of conversations all together, which one process renders."""
    from ..finetune import check_ids

    chats = {name: each["messages"] for name, each in prompts.items() if "messages" in each}
    for flag, value in (("--system", args.system), ("--template-arg", args.template_arg)):
        if value and not chats:
            raise ConfigError(f"{flag} is for conversations", hint='take --chat, or "messages" in a .jsonl file')
    for name, messages in chats.items():
        chats[name] = messages if messages[0]["role"] == "system" else [*_system(args), *messages]
    tools = {name: prompts[name]["tools"] for name in chats if "tools" in prompts[name]}
    rendered = iter(messages_to_ids(args, tokenizer, chats, tools) if chats else [])
    found: list[list[int]] = []
    for name, each in prompts.items():
        found.append(next(rendered) if name in chats else _ids(base, tokenizer, each["prompt"]))
        check_ids(found[-1], tokenizer, base.config.vocab_size, name)
    return found


def _ids(base: Any, tokenizer: Any, prompt: str) -> list[int]:
    from ..finetune import encode

    (encoding,) = encode(tokenizer, [prompt])
    ids = list(encoding.ids)
    begin = base.config.bos_token_id
    if not ids and begin is not None:
        return [begin]
    if not ids:
        raise ConfigError("a prompt is empty", expected="at least one token", hint="begin with a word or a newline")
    return ids


def _say_plan(console: Console, args: argparse.Namespace, base: Any, ids: list[list[int]]) -> None:
    from ..models import cache_bytes

    longest = max(map(len, ids)) + args.max_new_tokens
    rows = min(args.batch_size, len(ids) * args.num_samples)
    size = format_bytes(cache_bytes(base.config, rows, longest, base.compute_dtype))
    count = f"{len(ids):,} prompt" + ("" if len(ids) == 1 else "s")
    console.print(f"{count}, {rows} at once; keys and values take {size}", style="dim")
    if longest > base.config.max_position_embeddings:
        console.print(
            f"[bold yellow]warning[/] prompt and answer may have {longest:,} tokens, more than the "
            f"{base.config.max_position_embeddings:,} positions that the model was made for"
        )


def _say_text_is_no_question(console: Console, args: argparse.Namespace, prompts: list[dict[str, Any]]) -> None:
    """Warn who gives text to a model of chats, which then often has nothing to say."""
    if any("messages" in each for each in prompts):
        return
    if chat_template(args) is not None:
        console.print(
            "[bold yellow]warning[/] a prompt is continued as it is, without the model's chat template; for an answer "
            'take --chat, or "messages" in a .jsonl file'
        )


def _prompts(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Read prompts, by what they are called in errors."""
    if args.prompt is not None:
        return {"--prompt": {"prompt": args.prompt}}
    path = Path(args.prompts)
    if path.suffix not in (".txt", ".jsonl"):
        raise DataError(f"{path}: unknown kind of file", expected="a .txt or .jsonl file", hint="rename or convert it")
    try:
        content = path.read_bytes() if path.stat().st_size <= _MOST_PROMPTS_BYTES else None
        lines = None if content is None else content.decode("utf-8").removeprefix("\ufeff").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read", got=str(error), hint="give a UTF-8 file that is yours") from error
    if lines is None:
        raise DataError(f"{path}: too large", expected=format_bytes(_MOST_PROMPTS_BYTES), hint="split the file")
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not lines:
        raise DataError(f"{path}: no prompt in it", expected="a prompt a line", hint="check --prompts")
    if path.suffix == ".txt":
        return {f"{path}:{number}": {"prompt": line} for number, line in lines}
    return {f"{path}:{number}": _record(f"{path}:{number}", line) for number, line in lines}


def _record(where: str, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON", got=shortened(error), hint="one JSON object a line") from error
    found = record if isinstance(record, dict) else {}
    prompt, messages = found.get("prompt"), found.get("messages")
    if isinstance(prompt, str) and messages is None and found.get("tools") is None:
        return {"prompt": prompt}
    if prompt is None and messages and (chat := _chat_of(found, where)):
        return chat
    raise DataError(
        f"{where}: no prompt",
        expected='an object with "prompt", a text, or "messages", a list of objects with "role" and "content"',
        got=shortened(line),
        hint='one object a line; other fields than these are not read, but "tools" beside "messages"',
    )


def _chat_of(found: dict[str, Any], where: str) -> dict[str, Any]:
    """Read messages, and tools, as records to train on are read; nothing where something that is asked is missing."""
    from ..finetune.data import parse_record

    example = parse_record(found, where, {name: name for name in ("messages", "tools") if name in found})
    if example is None or any(each.get("content") is None and not each.get("tool_calls") for each in example.messages):
        return {}
    return {"messages": [*example.messages], **({} if example.tools is None else {"tools": example.tools})}


@contextlib.contextmanager
def _writer(name: str | None) -> Generator[TextIO | None]:
    """Open the file of answers, which may not be there yet: hours may have gone into the old one."""
    if name is None:
        yield None
        return
    if not name.endswith(".jsonl"):
        raise ConfigError(f"--output {name!r} is no .jsonl file", hint="the answers are JSON, an object a line")
    path = Path(name)
    try:
        file = open(path, "x", encoding="utf-8", errors="backslashreplace")
    except FileExistsError as error:
        raise OutputError(f"{path} is there already", hint="name a new file, or delete that one") from error
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written", got=str(error), hint="name a file in a folder of yours"
        ) from error
    with file:
        try:
            yield file
        finally:
            if file.tell() == 0:
                path.unlink(missing_ok=True)
