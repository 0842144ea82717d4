"""Table of the lint's rules: severity, reason and remedy of each."""

import re
from typing import NamedTuple

from forge_data.findings._finding import STOP, WARN, Finding


class Rule(NamedTuple):
    """One rule of the lint."""

    severity: str
    """Severity of its findings unless the place decides otherwise (`RULES` names both where both occur)."""
    why: str
    """What happens to a model that is trained on it all the same."""
    fix: str
    """What to do, unless the finding is more precise."""


SET_RULES = (
    *("conflicting_labels", "duplicate_row", "extreme_length", "label_fraction", "lost_to_length", "too_many_bad_rows"),
    "train_eval_overlap",
)
"""Rules that need more than one row."""

RULES: dict[str, Rule] = {
    # Rows of which no sample can be made.
    "unreadable_row": Rule(
        STOP,
        "prepare refuses the row (stop), or leaves it out where on_bad_row is skip (warn), as for the rules that follow",
        "mend the row or take it out",
    ),
    "too_many_bad_rows": Rule(
        STOP, "more rows are refused than max_bad_rows lets prepare leave out", "mend the rows, or raise max_bad_rows"
    ),
    "unknown_role": Rule(
        STOP,
        "prepare refuses the row; other tools train nothing of it",
        "use system, developer, user, assistant or tool",
    ),
    "template_refuses": Rule(
        STOP,
        "the chat template cannot write the row, or leaves open which tokens the assistant wrote",
        "use a template that takes such conversations, or take the row out",
    ),
    # Rows from which the model would learn something wrong.
    "untrained_turn_end": Rule(
        STOP,
        "the model never learns to stop; a warning of each turn where train_on_turn_end is none",
        "use a chat template that closes the assistant's turn with a token, such as the instruct model's, or leave "
        "train_on_turn_end at turn",
    ),
    "untrained_turn": Rule(
        STOP,
        "the template marks what is learned, and leaves out a turn of the assistant",
        "use a template that marks every turn of the assistant, or none",
    ),
    "double_bos": Rule(
        STOP,
        "every sample begins as no text does when the model is used",
        "take the token out of the rows: the tokenizer or the template writes it already",
    ),
    "reasoning_dropped": Rule(
        STOP,
        "the template leaves reasoning out; in the last turn (stop) the model learns to answer without it, in earlier turns "
        "(warn) the model sees the conversation as it will when it is used",
        "use a template that keeps reasoning, or take it out of the rows",
    ),
    "not_as_prompted": Rule(
        STOP,
        "turns=history (or train_on=all, or unmask) learns the turn in another context than the model is asked in; a stop "
        "where the text that is learned is another too",
        "leave turns at auto, or use a template that writes every turn as it is asked for (chat_template)",
    ),
    "inline_reasoning": Rule(
        STOP,
        "the model learns the tags of reasoning as text of its answer, behind the template's own block or in its final channel",
        "give the reasoning in a field of its own (reasoning_content)",
    ),
    "unclosed_reasoning": Rule(
        STOP,
        "the model learns to think and never to answer; generated data that was cut off looks so",
        "close it with </think> and an answer, or take the row out",
    ),
    "tool_arguments": Rule(
        STOP,
        "the model learns to write calls that no program can read; a null within (warn) is what merged schemas leave",
        "write the arguments as a JSON object",
    ),
    "empty_turn": Rule(
        STOP,
        "a row whose every answer is empty (stop) teaches to answer nothing; one empty turn among others is a warning",
        "write the turn, or take the row out",
    ),
    "special_token_in_text": Rule(
        STOP,
        "text that the tokenizer reads as a token of its own; in an answer (stop) the model learns to break off there, "
        "elsewhere (warn) it sees a turn that is none; what stands for an image (stop) would be one too many beside images",
        "take it out of the text, or write it otherwise",
    ),
    "same_answers": Rule(
        STOP,
        "chosen and rejected are the same: nothing is learned from the pair; prepare refuses the row (stop), or leaves it out "
        "where on_bad_pair is skip (warn), as for the two rules that follow",
        "take the pair out",
    ),
    "prompts_differ": Rule(
        STOP,
        "chosen and rejected answer two prompts: the model learns which prompt is preferred",
        "give two answers to one prompt",
    ),
    "empty_answer": Rule(STOP, "an empty answer, so that nothing is preferred", "give the answer, or take the row out"),
    "train_eval_overlap": Rule(
        STOP,
        "the evaluation asks what was learned by heart, so the model looks better than it is",
        "take the row out of one of the two",
    ),
    # Rows worth a look.
    "no_trained_token": Rule(
        WARN, "the row is left out and counted", "give it an assistant turn, a completion, or labels that are not -100"
    ),
    "untrained_last_turn": Rule(
        WARN,
        "text after the last answer is never learned, and no learned text follows it",
        "add the answer, or take the turn out",
    ),
    "role_order": Rule(
        WARN, "turns that do not alternate as they do when the model is used", "merge or reorder the turns, or take the row out"
    ),
    "tool_call_without_result": Rule(
        WARN, "the model sees a call without an answer", "add the tool's message, or take the call out"
    ),
    "tool_result_without_call": Rule(
        WARN, "the model sees an answer without a call", "add the call that it answers, or take it out"
    ),
    "unknown_tool": Rule(
        WARN, "the model learns to call what it was not offered", "name it in the row's tools, or correct the call"
    ),
    "foreign_markup": Rule(
        WARN,
        "turn marks of a template, plain text to this tokenizer: the rows were rendered for another model",
        "give the conversation as messages and let the template write the marks",
    ),
    "role_label_in_text": Rule(
        WARN,
        "an answer that carries a role's name as text, or goes on with the user's next turn: the model learns to do so",
        "cut the label, and split the text into messages",
    ),
    "broken_unicode": Rule(
        WARN,
        "characters that were lost or read in the wrong encoding; half a surrogate pair (stop) no tokenizer takes",
        "read the source in its own encoding and write it anew as UTF-8",
    ),
    "straddling_token": Rule(
        WARN,
        "a token that has characters of a learned stretch and of one that is not, and is not learned (train_detail, parts)",
        "let the learned stretch begin before the blank, as tokens do",
    ),
    "missing_eos": Rule(
        WARN,
        "the row's last learned token ends no turn, so it does not teach the model to stop",
        "put the tokenizer's EOS or turn-end token last, and learn it",
    ),
    "lossy_image": Rule(
        WARN,
        "the model sees less of an image than a person does: the first frame, 8 bits of each colour, and nothing transparent",
        "write the image as it is to be seen: one frame, 8 bits, no transparency",
    ),
    "lossy_video": Rule(
        WARN,
        "the model's processor writes times of frames into the text, or counts positions by them, and does not know these",
        "give a list of frames its sample_fps, the frames in a second",
    ),
    "lossy_audio": Rule(
        WARN,
        "the model's processor hears a clip up to a limit, and what is behind it is neither trained on nor answered",
        "cut the clip, and its answer with it",
    ),
    "image_mark_in_text": Rule(
        WARN,
        "the mark stands for an image where a row has some; in a row without any the model sees the letters",
        "give the row its images (a column under another name: rename_columns), or take the mark out",
    ),
    "video_mark_in_text": Rule(
        WARN,
        "the mark stands for a video where a row has some; in a row without any the model sees the letters",
        "give the row its videos (a column under another name: rename_columns), or take the mark out",
    ),
    "audio_mark_in_text": Rule(
        WARN,
        "the mark stands for audio where a row has some; in a row without any the model sees the letters",
        "give the row its audio (a column under another name: rename_columns), or take the mark out",
    ),
    "duplicate_row": Rule(WARN, "the row counts as often as it occurs", "take the repetitions out unless they are meant"),
    "conflicting_labels": Rule(
        WARN,
        "the same text with another label (or margin): both are learned, and the model can be right about one",
        "keep the one that is right",
    ),
    "label_fraction": Rule(
        WARN,
        "far more or far less of the row is learned than of the others: often a mask, or a paste, gone wrong",
        "look at its tokens with show",
    ),
    "extreme_length": Rule(
        WARN,
        "far longer than all others: a micro-batch holds at least the longest sample, so one row decides the memory of a run",
        "look at it; set max_seq_len to leave it out, or shorten or split the row",
    ),
    "lost_to_length": Rule(
        WARN, "what is longer than max_seq_len is not trained on", "raise max_seq_len, or shorten or split the rows"
    ),
}


_PLACE = re.compile(r"(.*)[:\[](\d+)\]?", re.DOTALL)


class Where(NamedTuple):
    """The row that a finding is about."""

    file: str
    row: int | None
    place: str

    @classmethod
    def of(cls, place: str) -> "Where":
        """Split a place: `train.jsonl:417` or `train.json[416]`."""
        parts = _PLACE.fullmatch(place)
        return cls(parts[1], int(parts[2]), place) if parts else cls(place, None, place)


def found(
    rule: str,
    where: Where,
    field: str,
    what: str,
    *,
    severity: str | None = None,
    fix: str | None = None,
    texts: tuple[str, str] | None = None,
) -> Finding:
    """Make a finding of a rule, with the table's severity and fix unless others are given."""
    known = RULES[rule]
    return Finding(rule, severity or known.severity, where.file, where.row, field, what, fix or known.fix, where.place, texts)
