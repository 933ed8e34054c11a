"""Commands that show what is in embeddings: lenses on single texts, and a map of many."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llm2vec_gen_st.cli.options import (
    BatchSize,
    Dtype,
    DtypeOption,
    PromptName,
    instruction_name,
    load_model,
    plain,
)

if TYPE_CHECKING:
    from llm2vec_gen_st.interpret import ChainStep, ContextMatch, LensToken

OtherModel = Annotated[str | None, typer.Option(help="Another model than the built-in one.")]

MAP_PICTURE, MAP_PAGE, POINTS_FILE, SEPARATION_FILE = "map.png", "map.html", "points.jsonl", "separation.json"
# Nearest contexts shown a compression token.
_CONTEXTS = 3


def explain(
    texts: Annotated[list[str], typer.Argument(help="Texts to embed and to look into.", show_default=False)],
    model: OtherModel = None,
    top_k: Annotated[int, typer.Option(min=1, help="Tokens shown a compression token.")] = 5,
    keep_all: Annotated[
        bool, typer.Option("--keep-all", help="Leave in stop words, punctuation, and the text's own words.")
    ] = False,
    png: Annotated[Path | None, typer.Option(help="Draw the tokens as a heat map into this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with numbers on hover into this file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything as JSON into this file.")] = None,
    contexts: Annotated[
        Path | None,
        typer.Option("--lens", help="An index of `latent-lens build`: show the nearest tokens of its corpus too."),
    ] = None,
    chain: Annotated[
        int, typer.Option(min=0, help="Let the LLM read its soft prompt again this often, and decode each step.")
    ] = 0,
    prompt_name: PromptName = "query",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest decoded text, in tokens.")] = 64,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Show what embeddings hold: the text they decode to, and the likeliest tokens at each compression token.

    Example:
        llm2vec-gen explain 'How do I reset my password?' --png lens.png --top-k 8
    """
    _check_endings((png, ".png"), (html, ".html"), (json, ".json"))
    if contexts is not None and not contexts.is_dir():
        raise FileNotFoundError(f"{contexts}: there is no such folder.")
    from llm2vec_gen_st.interpret import (
        Dropping,
        LatentLens,
        draw_lens,
        latent_chain,
        logit_lens,
        write_lens_page,
    )

    loaded = load_model(model_name(model), dtype)
    lens = None if contexts is None else LatentLens.load(contexts, loaded)
    name = instruction_name(prompt_name)
    chained = latent_chain(loaded, texts, steps=chain, prompt_name=name, max_new_tokens=max_new_tokens)
    decoded = [step.decoded for step in chained if step.step == 0]
    tokens = logit_lens(loaded, texts, top_k=top_k, drop=None if keep_all else Dropping(), prompt_name=name)
    matches = [] if lens is None else lens.nearest(texts, k=_CONTEXTS, prompt_name=name)
    console = Console()
    for number, (text, said) in enumerate(zip(texts, decoded, strict=True)):
        console.print(Text(text.strip(), style="bold"))
        console.print(Text("decodes to: ").append(said.strip() or "(nothing)"))
        for step in chained:
            if step.input == number and step.step:
                shown = Text(f"step {step.step}, cosine {step.similarity_to_first:.3f}: ")
                console.print(shown.append(step.decoded.strip() or "(nothing)"))
        console.print(_lens_table([token for token in tokens if token.input == number], top_k))
        if lens is not None:
            console.print(_contexts_table([match for match in matches if match.input == number]))
    if png is not None:
        draw_lens(png, tokens)
    if html is not None:
        write_lens_page(html, tokens, decoded=decoded, contexts=matches)
    if json is not None:
        _write_json(json, texts, chained, tokens, matches)


def map_texts(
    file: Annotated[
        Path, typer.Argument(help="A .jsonl (or .parquet) file with 'text' and 'label'.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of picture, page and numbers.")],
    model: OtherModel = None,
    prompt_name: PromptName = "query",
    neighbours: Annotated[int, typer.Option(min=1, help="Nearest neighbours whose class is compared.")] = 5,
    batch_size: BatchSize = 32,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Map labelled texts under mean pooling of the LLM, beside their map under the model.

    Example:
        llm2vec-gen map intents.jsonl --output intents-map
    """
    rows = _labelled(file)
    from llm2vec_gen_st.files import write_json, write_rows
    from llm2vec_gen_st.interpret import draw_map, idea_map, write_map_page

    found = idea_map(
        load_model(model_name(model), dtype),
        [row["text"] for row in rows],
        [row["label"] for row in rows],
        prompt_name=instruction_name(prompt_name),
        neighbours=neighbours,
        batch_size=batch_size,
    )
    draw_map(output / MAP_PICTURE, found)
    write_map_page(output / MAP_PAGE, found)
    write_rows(output / POINTS_FILE, map(asdict, found.points))
    write_json(output / SEPARATION_FILE, [asdict(separation) for separation in found.separation])
    table = Table("encoder", "silhouette", "neighbours of the same class")
    for separation in found.separation:
        table.add_row(separation.encoder, f"{separation.silhouette:.3f}", f"{separation.neighbour_agreement:.1%}")
    Console().print(table)
    print(f"{output}: {MAP_PICTURE}, {MAP_PAGE}, {POINTS_FILE} and {SEPARATION_FILE} written.")


def model_name(model: str | None) -> str:
    """The model named, or the built-in one."""
    from llm2vec_gen_st.demo.run import MODEL

    return model or MODEL


def _check_endings(*files: tuple[Path | None, str]) -> None:
    for path, ending in files:
        if path is not None and path.suffix.lower() != ending:
            raise ValueError(f"{path}: the file's name must end in {ending}.")


def _labelled(path: Path) -> list[dict[str, Any]]:
    """Rows with the keys ``text`` and ``label``, both texts."""
    from llm2vec_gen_st.cli.rows import input_rows

    rows = input_rows(None, path, "text")
    for number, row in enumerate(rows):
        if not isinstance(row.get("label"), str | int):
            raise ValueError(f"{path}, row {number} has no class in the column 'label'.")
    return [{"text": row["text"], "label": str(row["label"])} for row in rows]


def _lens_table(tokens: list[LensToken], ranks: int) -> Table:
    from llm2vec_gen_st.interpret.shown import shown_token

    table = Table("", *(str(rank) for rank in range(1, ranks + 1)))
    by_position: dict[int, list[Text]] = {}
    for token in tokens:
        cell = plain(shown_token(token.token)).append(f" {token.probability:.3f}", style="dim")
        by_position.setdefault(token.position, []).append(cell)
    for position, cells in by_position.items():
        table.add_row(f"c{position + 1}", *cells)
    return table


def _contexts_table(matches: list[ContextMatch]) -> Table:
    table = Table("", "cosine", "nearest contexts")
    for match in matches:
        before, token, after = match.parts
        # Marks too, for where styles are lost, such as in a pipe.
        sentence = Text.assemble(before, (f"«{token}»", "bold reverse"), after)
        table.add_row(f"c{match.position + 1}", f"{match.similarity:.3f}", sentence)
    return table


def _write_json(
    path: Path, texts: list[str], chained: list[ChainStep], tokens: list[LensToken], matches: list[ContextMatch]
) -> None:
    from llm2vec_gen_st.files import write_json

    found: list[dict[str, Any]] = [
        {"text": text, "decoded": "", "chain": [], "lens": [], "contexts": []} for text in texts
    ]
    for step in chained:
        if step.step:
            fields = asdict(step)
            found[step.input]["chain"].append(
                {key: fields[key] for key in ("step", "decoded", "similarity_to_first", "similarity_to_previous")}
            )
        else:
            found[step.input]["decoded"] = step.decoded
    for key, items in (("lens", tokens), ("contexts", matches)):
        for item in items:
            fields = asdict(item)
            found[fields.pop("input")][key].append({name: value for name, value in fields.items() if name != "text"})
    write_json(path, found)
