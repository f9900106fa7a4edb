"""Chat templates of models that think before they answer: what is rendered, what carries loss.
The templates are small ones that behave as those of the models they are named after."""
import json
import os
import unittest

from test_data_rows import Odd

END = "<|im_end|>"
ASKED = "<|im_start|>assistant\n"


def cutting(prompt, said="m.content.split('</think>')[-1]"):
    """A template that cuts every answer at </think>; `prompt`: what generation begins with."""
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant'"
        " %}{{ SAID }}{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>'"
        " }}{% endfor %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>' }}{% if m.role !="
        " 'assistant' %}{{ '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{"
        " '<|im_start|>assistant\n' + PROMPT }}{% endif %}".replace(
            "SAID", said
        ).replace(
            "PROMPT", prompt
        )
    )


# DeepSeek-R1's distilled models; QwQ, which strips; their first release, which opened no thought;
# DeepSeek-V3.1, where an argument opens it and a rendered answer always begins behind it.
R1 = cutting("'<think>\n'", "(m.content or '').split('</think>')[-1]")
QWQ = cutting("'<think>\n'", "m.content.split('</think>')[-1].lstrip('\n')")
FIRST = cutting("''")
V31 = cutting(
    "('<think>' if thinking else '</think>')", "'</think>' + m.content.split('</think>')[-1]"
)
# Qwen3: the thinking of what comes behind the last question stays, and of the last answer an empty
# block; replies of tools are the user's and no question.
QWEN3 = (
    "{% set last = namespace(at=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set thought = m.reasoning_content or '' %}{% set said = m.content or '' %}"
    "{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > last.at and (loop.last or thought) %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ said }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<reply>' + m.content + '</reply><|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name):
    return [{"type": "function", "function": {"name": name, "arguments": {}}}]


def asked(*messages):
    """What the templates above write before an answer."""
    said = [f"<|im_start|>{m['role']}\n{m['content']}{END}\n" for m in messages]
    return "".join(said) + ASKED


class Thinking(Odd):
    def take(self, template):
        self.change("tokenizer_config.json", lambda c: c.update(chat_template=template))

    def parts(self, *rows, options=()):
        """[(what carries no loss before the answer, what does, what follows)] of every sample."""
        said = self.build(self.lines(rows), options=["--restart", "--force", *options])
        made, pick = [], lambda ids: self.loaded().decode(ids, skip_special_tokens=False)
        for tokens, mask in self.documents():
            first, last = mask.index(1), len(mask) - mask[::-1].index(1)
            made.append((pick(tokens[:first]), pick(tokens[first:last]), pick(tokens[last:])))
            self.assertEqual(set(mask[first:last]), {1})
        self.said = said
        return made

    def refusal(self, row, *words, options=()):
        options = ["--restart", "--force", *options]
        error = self.build(self.lines([row]), options=options, status=2)
        for word in ("chat.jsonl:1: ", *words):
            self.assertIn(word, error)
        self.assertEqual(error.count("\n"), 1, error)
        return error


class CutAtTheThought(Thinking):
    def test_the_thought_of_the_last_answer_is_learnt(self):
        ring = user("ring")
        for template, opened in ((R1, "<think>\n"), (QWQ, "<think>\n"), (FIRST, "")):
            self.take(template)
            begun = asked(ring) + opened
            for said in ("<think>\nchunk of\n</think>\n\nstripe", "<think>\n\n</think>\n\nstripe"):
                expected = said.removeprefix(opened) + END
                ((before, learnt, after),) = self.parts([ring, answer(said)])
                self.assertEqual((before + learnt, after), (begun + expected, ""))
                # One token may hold the line feed of the prompt and the answer's first one.
                self.assertIn(learnt.removeprefix("\n" * (learnt != expected)), expected)
        self.take(R1)
        for more in ({"reasoning_content": "chunk of"}, {"thinking": "chunk of\n"}):
            ((before, learnt, _),) = self.parts([ring, answer("stripe", **more)])
            self.assertEqual(before, asked(ring) + "<think>\n")
            self.assertEqual(learnt, "chunk of\n</think>\n\nstripe" + END)
        ((before, learnt, _),) = self.parts([ring, answer("chunk of\n</think>\n\nstripe")])
        self.assertEqual(before, asked(ring) + "<think>\n")
        self.assertEqual(learnt, "chunk of\n</think>\n\nstripe" + END)

    def test_an_answer_without_a_thought_closes_the_one_that_the_prompt_opens(self):
        for template in (R1, QWQ):
            self.take(template)
            ((before, learnt, _),) = self.parts([user("ring"), answer("stripe")])
            whole = asked(user("ring")) + "<think>\n\n</think>\n\nstripe" + END
            self.assertEqual(before + learnt, whole)
            self.assertIn("</think>\n\nstripe" + END, learnt)
            self.assertIn("1 answers without a thought, which the prompt opens", self.said)

    def test_earlier_turns_are_rendered_as_the_template_does(self):
        first, second = (answer(f"<think>\nchunk of {i}\n</think>\n\nstripe {i}") for i in "12")
        row = [user("ring 1"), first, user("ring 2"), second]
        self.take(R1)
        self.refusal(row, "--turns")
        one, two = self.parts(row, options=["--turns"])
        for i, (before, learnt, after) in enumerate((one, two), 1):
            self.assertEqual(learnt, f"chunk of {i}\n</think>\n\nstripe {i}{END}")
        earlier = asked(user("ring 1")) + "\n\nstripe 1" + END
        self.assertEqual(two[0], earlier + asked(user("ring 2")) + "<think>\n")
        # Where only the last answer is learnt, the conversation is one sample already.
        first["weight"] = 0
        self.assertEqual(self.parts(row), [two])

    def test_a_template_that_opens_no_thought_and_cuts_every_one(self):
        first, second = (answer(f"<think>{i}</think>stripe {i}") for i in "12")
        row = [user("ring 1"), first, user("ring 2"), second]
        self.take(FIRST)
        self.refusal(row, "--turns")
        learnt = [part[1] for part in self.parts(row, options=["--turns"])]
        self.assertEqual(learnt, [f"<think>{i}</think>stripe {i}{END}" for i in "12"])

    def test_an_argument_that_opens_or_closes_the_thought(self):
        self.take(V31)
        row = [user("ring"), answer("<think>chunk of</think>stripe")]
        self.refusal(row, "message 2", "thinking=true", "take it out")
        first = [user("ring"), answer("stripe", reasoning="chunk of")]
        for more in ([], [user("ring")], [user("ring"), answer("1234")]):
            words = ("thinking of message 2", "--turns") if more else ("thinking=true",)
            self.refusal(first + more, *words)
            self.refusal(first + more, "message 2 holds thinking", options=["--turns"])
        ((before, learnt, _),) = self.parts(row, options=["--template-arg", "thinking=true"])
        self.assertEqual(before, asked(user("ring")) + "<think>")
        self.assertEqual(learnt, "chunk of</think>stripe" + END)
        ((before, learnt, _),) = self.parts([user("ring"), answer("stripe")])
        self.assertEqual((before, learnt), (asked(user("ring")) + "</think>", "stripe" + END))

    def test_calls_of_tools_keep_their_thought(self):
        self.take(R1)
        row = [user("ring"), answer(None, reasoning="chunk of", tool_calls=call("stripe"))]
        ((before, learnt, _),) = self.parts(row)
        self.assertEqual(before, asked(user("ring")) + "<think>\n")
        self.assertEqual(learnt, "chunk of\n</think>\n\n<call>stripe</call>" + END)

    def test_a_thought_that_stands_in_both_places_is_learnt_once(self):
        said = "<think>\nchunk of\n</think>\n\nstripe"
        both = [user("ring"), answer(said, reasoning_content="chunk of\n")]
        for template, opened in ((R1, "<think>\n"), (QWEN3, "")):
            self.take(template)
            ((_, learnt, _),) = self.parts(both)
            self.assertEqual(learnt, said.removeprefix(opened) + END)
            other = [user("ring"), answer(said, reasoning_content="1234")]
            self.refusal(other, "reasoning_content and another thought in its content")
        self.take(R1)
        self.refusal([user("ring"), answer("x</think>y", thinking="z")], "leave one out")

    def test_an_answer_that_opens_a_thought_without_an_end_is_refused(self):
        for template, options in (
            (R1, []),
            (FIRST, []),
            (V31, ["--template-arg", "thinking=false"]),
            (QWEN3, []),
            (QWEN3, ["--template-arg", "enable_thinking=false", "--turns"]),
        ):
            self.take(template)
            for said in ("<think>chunk of", "<think></think>\n\n<think>\nstripe"):
                row = [user("ring"), answer(said)]
                self.refusal(row, "message 2", "<think> that has no </think>", options=options)
            row[1]["weight"] = 0  # what carries no loss is not learnt
            row += [user("ring"), answer("<think>x</think>stripe" if template == R1 else "stripe")]
            self.assertEqual(len(self.parts(row, options=options)), 1)
        row = [user("ring"), answer("<think>x", reasoning_content="chunk of")]
        self.refusal(row, "<think> that has no </think>")
        self.parts(row, [user("ring"), answer("stripe")], options=["--bad-rows", "skip"])
        self.assertIn("1 bad rows skipped: message 2 opens a thought", self.said)

    def test_a_thought_that_is_opened_later_may_be_text_and_is_counted(self):
        self.take(R1)
        ((_, learnt, _),) = self.parts([user("ring"), answer("the tag <think> of a stripe")])
        self.assertIn("the tag <think> of a stripe" + END, learnt)
        self.assertIn("1 answers with <think> behind their beginning and no </think>", self.said)

    def test_pairs(self):
        self.take(R1)
        said = [answer(f"<think>\n{t}\n</think>\n\nstripe") for t in ("chunk of", "1234")]
        row = {"prompt": "ring", "chosen": said[:1], "rejected": said[1:]}
        for (before, learnt, _), thought in zip(
            self.parts(row, options=["--pairs"]), ("chunk of", "1234")
        ):
            self.assertEqual(before, asked(user("ring")) + "<think>\n")
            self.assertEqual(learnt, thought + "\n</think>\n\nstripe" + END)


class KeptBehindTheLastQuestion(Thinking):
    def setUp(self):
        super().setUp()
        self.take(QWEN3)

    def test_the_last_answer_and_its_thought(self):
        for message in (
            answer("<think>\nchunk of\n</think>\n\nstripe"),
            answer("stripe", reasoning_content="chunk of"),
        ):
            ((before, learnt, after),) = self.parts([user("ring"), message])
            self.assertEqual((before, after), (asked(user("ring")), "\n"))
            self.assertEqual(learnt, "<think>\nchunk of\n</think>\n\nstripe" + END)
        row = [user("ring"), answer("stripe")]
        ((_, learnt, _),) = self.parts(row)
        self.assertEqual(learnt, "<think>\n\n</think>\n\nstripe" + END)
        ((before, learnt, _),) = self.parts(
            row, options=["--template-arg", "enable_thinking=false"]
        )
        self.assertEqual(before, asked(user("ring")) + "<think>\n\n</think>\n\n")
        self.assertEqual(learnt, "stripe" + END)

    def test_an_empty_thought_behind_one_of_the_prompt_is_learnt_once(self):
        row = [user("ring"), answer("<think>\n\n</think>\n\nstripe")]
        for more in ([], ["--turns"]):
            options = ["--template-arg", "enable_thinking=false", *more]
            ((before, learnt, _),) = self.parts(row, options=options)
            self.assertEqual(before, asked(user("ring")) + "<think>\n\n</think>\n\n")
            self.assertEqual(learnt, "stripe" + END)

    def test_a_part_of_a_content_that_would_vanish_is_refused(self):
        said = {
            "<think>1</think>chunk of<think>2</think>stripe": "chunk of",
            "chunk of\n<think>1</think>stripe": "chunk of",
            "<think>1 <think>2</think>stripe": "1",
        }
        first = [user("ring"), answer("1234", weight=0)]
        for text, lost in said.items():
            for before, more in (([], []), ([], ["--turns"]), (first, []), (first, ["--turns"])):
                row = [*before, user("ring"), answer(text)]
                words = (f"leaves out {lost!r} of the content of message {len(row)}", "--bad-rows")
                self.refusal(row, *words, options=more)
        self.take(R1)  # which gets the whole thought put back
        ((_, learnt, _),) = self.parts([user("ring"), answer(next(iter(said)))])
        self.assertEqual(learnt, next(iter(said)).removeprefix("<think>") + END)

    def test_a_thought_that_the_prompt_rules_out_is_refused(self):
        for message in (answer("<think>\nx\n</think>\n\nstripe"), answer("stripe", thinking="x")):
            options = ["--template-arg", "enable_thinking=false"]
            error = self.refusal([user("ring"), message], "message 2", "thinking", options=options)
            self.assertNotIn("--turns", error)

    def test_earlier_thoughts_are_left_out_of_later_samples(self):
        first = answer("<think>\nchunk of\n</think>\n\nstripe")
        row = [user("ring 1"), first, user("ring 2"), answer("1234", reasoning_content="x")]
        self.refusal(row, "--turns")
        one, two = self.parts(row, options=["--turns"])
        self.assertEqual(one[1], "<think>\nchunk of\n</think>\n\nstripe" + END)
        earlier = f"{asked(user('ring 1'))}stripe{END}\n"
        self.assertEqual(two[0], earlier + asked(user("ring 2")))
        self.assertEqual(two[1], "<think>\nx\n</think>\n\n1234" + END)
        first["weight"] = 0
        self.assertEqual(self.parts(row), [two])

    def test_several_steps_with_tools(self):
        reply = {"role": "tool", "content": "12"}
        step = answer("", reasoning_content="chunk of", tool_calls=call("stripe"))
        row = [user("ring"), step, reply, answer("1234", reasoning_content="x")]
        written = "<think>\nchunk of\n</think>\n\n<call>stripe</call>" + END
        last = "<think>\nx\n</think>\n\n1234" + END
        between = f"\n<|im_start|>user\n<reply>12</reply>{END}\n{ASKED}"
        self.build(self.lines([row]), options=["--restart", "--force"])
        ((tokens, mask),) = self.documents()
        pick = lambda one: self.loaded().decode(
            [t for t, m in zip(tokens, mask) if m == one], False
        )
        self.assertEqual(pick(1), written + last)
        self.assertEqual(pick(0), asked(user("ring")) + between + "\n")
        step.pop("reasoning_content")  # a step without a thought, which has an empty block if last
        self.refusal(row, "--turns")
        one, two = self.parts(row, options=["--turns"])
        self.assertEqual(one[1], "<think>\n\n</think>\n\n<call>stripe</call>" + END)
        self.assertEqual(two[1], last)
        self.assertEqual(two[0], f"{asked(user('ring'))}<call>stripe</call>{END}{between}")

    def test_pairs_of_several_steps_name_a_remedy_that_pairs_have(self):
        step = answer("", tool_calls=call("stripe"))
        ends = [[step, {"role": "tool", "content": "12"}, answer(text)] for text in ("a", "b")]
        row = {"prompt": "ring", "chosen": ends[0], "rejected": ends[1]}
        error = self.refusal(row, "--chat-template", options=["--pairs"])
        self.assertNotIn("--turns", error)


if __name__ == "__main__":
    unittest.main()
