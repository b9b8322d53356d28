r"""Numbers in answers and references, through the reward `numeric`.

Each line: an answer, a reference, and what the reward is: 1, 0, or ERROR for a reference that is not one number.
"""

from __future__ import annotations

import random
import time
from fractions import Fraction
from typing import Any

import pytest

from lockstep.rewards.functions.built_in import numeric
from lockstep.rewards.functions.numbers import final_number, first_number, only_number
from lockstep.rollout.errors import DataError
from tests.unit.rewards.functions.test_built_in import rollout

ERROR = "error"
TABLE: list[tuple[str, Any, float | str]] = [
    # Boxes: balanced braces, the last one, and nothing but its content.
    (r"\boxed{\frac{3}{5}}", "3/5", 1), (r"\boxed{\frac{3}{5}}", "5", 0), (r"\boxed{\frac{3}{5}}", "0.6", 1),
    (r"\boxed{\dfrac{3}{5}}", r"\frac{3}{5}", 1), (r"\boxed{\tfrac35}", "0.6", 1),
    (r"\boxed{-\frac{3}{5}}", "-3/5", 1), (r"\boxed{\frac{-3}{5}}", "-0.6", 1), (r"\boxed{\frac{3}{-5}}", "-0.6", 1),
    (r"\boxed{\frac{3}{0}}", "3", 0), (r"\boxed{3} or \boxed{4}", "4", 1), (r"\boxed{3} or \boxed{4}", "3", 0),
    (r"\boxed{5} is not 8", "5", 1), (r"\boxed{5} is not 8", "8", 0), (r"\boxed{5", "5", 0),
    (r"\boxed{4} and \boxed{5", "4", 0), (r"\boxed{x} 3", "3", 0), (r"\boxed{}", "5", 0),
    (r"\boxed{\boxed{5}}", "5", 1), (r"\boxed 5", "5", 1), (r"\fbox{5}", "5", 1),
    (r"$$\boxed{\left(5\right)}$$", "5", 1), (r"\boxed{\text{5}}", "5", 1), (r"\boxed{\mathbf{5}}", "5", 1),
    (r"\boxed{x=5}", "5", 1), (r"\boxed{\theta = 5^\circ}", "5", 1), (r"\boxed{3+4=7}", "7", 1),
    (r"\boxed{a=3, b=5}", "5", 0), (r"\boxed{2x = 10}", "10", 0), (r"\boxed{3, 5}", "5", 0),
    (r"\boxed{(3, 5)}", "5", 0), (r"\boxed{3 \text{ or } 5}", "5", 0), (r"\boxed{\pm 5}", "5", 0),
    (r"\boxed{\{5\}}", "5", 0), (r"\boxed{5!}", "5", 0), (r"\boxed{\sqrt{16}}", "16", 0),
    (r"\boxed{\sqrt{16}}", "4", 0), (r"\boxed{2^{10}}", "10", 0), (r"\boxed{5^2}", "5", 0), (r"\boxed{5²}", "5", 0),
    (r"\boxed{2\pi}", "2", 0), (r"\boxed{2π}", "2", 0), (r"\boxed{5x}", "5", 0), (r"\boxed{5 xy}", "5", 0),
    (r"\boxed{3 \cdot 5}", "5", 0), (r"\boxed{x \le 5}", "5", 0), (r"\boxed{10-3}", "-3", 0),
    (r"\boxed{10-3}", "7", 0), (r"\boxed{1011_2}", "1011", 0), (r"\boxed{\binom{5}{2}}", "2", 0),
    (r"\boxed{12:30}", "30", 0), (r"\boxed{3:4}", "4", 0), (r"\boxed{1.2.3}", "3", 0),
    (r"\boxed{5 \text{ ft } 3 \text{ in}}", "3", 0),
    # Separators.
    (r"\boxed{1{,}234}", "1234", 1), (r"\boxed{1{,}234}", "234", 0), (r"\boxed{1,234}", "1234", 1),
    (r"\boxed{1\,234\,567}", "1234567", 1), (r"\boxed{1,\!234}", "1234", 1), ("1\u202f234", "1234", 1),
    ("It is 1 234 567.", "1234567", 1), ("1,23,456", "123456", 1), ("12,34", "34", 0), ("1,0000", "0", 0),
    ("0,5", "5", 0), ("1.234,56", "56", 0), ("1'234", "234", 0), ("$1,234.50", "1234.5", 1),
    ("100,000,000", "1e8", 1),
    # Signs and scripts.
    ("−5", "-5", 1), ("−5", "5", 0), (r"\boxed{−5}", "-5", 1), ("x = − 5", "-5", 1), ("x = -5", "-5", 1),
    ("–5", "-5", 1), ("－5", "-5", 1), ("+5", "5", 1), ("-0", "0", 1), ("negative 5", "-5", 1),
    ("It is minus 5.", "-5", 1), ("-$5", "-5", 1), ("$-5", "-5", 1), ("(-5)", "-5", 1), ("±5", "5", 0),
    ("٣٥", "35", 1), ("５", "5", 1), ("答案是5", "5", 1), ("5个苹果", "5", 1), ("5万", "5", 0), ("½", "0.5", 1),
    ("1⁄2", "0.5", 1),
    # Fractions and mixed numbers.
    ("3/4", "0.75", 1), ("3/4", "4", 0), ("-3/4", "-0.75", 1), ("1 1/2", "1.5", 1), ("1½", "1.5", 1),
    (r"1\frac12", "3/2", 1), (r"-1\frac{1}{2}", "-1.5", 1), ("2 and a half", "2.5", 1), ("2 and 1/2 hours", "2.5", 1),
    ("1/2/3", "3", 0), ("1 3/2", "1.5", 0), (r"The answer is $\frac{3}{4}$.", "3/4", 1), ("3/0", "0", 0),
    # Exponents.
    ("1.5e3", "1500", 1), ("1.5E+3", "1500", 1), (r"1.5 \times 10^{3}", "1500", 1), (r"$1.5\cdot 10^3$", "1500", 1),
    ("1.5 x 10^3", "1500", 1), ("1.5×10³", "1500", 1), ("2·10⁻³", "0.002", 1), ("10^{6}", "1000000", 1),
    ("1e99999", "1", 0), (r"1.5 \times 10^{3}", "3", 0), ("2 million", "2000000", 1), ("$1.5 million", "1500000", 1),
    ("2 million", "2", 0),
    # Units.
    (r"\boxed{5\%}", "5", 1), ("50%", "50", 1), ("50%", "0.5", 0), (r"\boxed{5^\circ}", "5", 1), ("5°C", "5", 1),
    (r"\boxed{5^{\circ}\text{C}}", "5", 1), (r"\boxed{5\text{ kg}}", "5", 1),
    (r"\boxed{5\,\mathrm{m}/\mathrm{s}}", "5", 1), (r"\boxed{5 kg}", "5", 1), (r"\boxed{5kg}", "5", 1),
    (r"\boxed{5\text{ cm}^2}", "5", 1), ("5 cm²", "5", 1), ("5 apples", "5", 1), ("5 dollars per day", "5", 1),
    ("5$", "5", 1), (r"\$5", "5", 1), ("€5", "5", 1), ("US$5", "5", 1), ("USD 5", "5", 1),
    ("a 20-mile trip", "20", 1), ("5 squared", "5", 0), ("five", "5", 0),
    # The last number of a text.
    ("The answer is 5.", "5", 1), ("The answer is 5!", "5", 1), ("The answer is **-5**.", "-5", 1), ("x = 5", "5", 1),
    ("**Answer:** 5", "5", 1), ("Answer:5", "5", 1), ("<answer>5</answer>", "5", 1), ("#### 1,234", "1234", 1),
    ("3 + 4 = <<3+4=7>>7\n#### 7", "7", 1), ("so 3 and then 7", "7", 1), ("so 3 and then 7", "3", 0),
    ("f(3) = 5", "5", 1), (r"\begin{aligned} x &= 5 \end{aligned}", "5", 1), ("- 5 pears\n- 7 apples", "7", 1),
    ("42, from H2O", "42", 1), ("42, as the 5th says", "42", 1), ("no idea", "5", 0), ("", "5", 0),
    ("The answer is 10-3", "-3", 0), ("The answer is 10 - 3.", "3", 0), ("10 −3", "-3", 0),
    ("The answer is x - 5", "5", 0), ("The answer is x + 5", "5", 0), ("The answer is 5x", "5", 0),
    (r"It is $2\pi$.", "2", 0), ("It is sqrt(16)", "16", 0), ("It is log 100", "100", 0), ("5 × 3 meters", "3", 0),
    ("It takes 3–4 hours", "4", 0), ("It takes 3–4 hours", "-4", 0), ("COVID-19", "-19", 0), ("at 12:30", "30", 0),
    ("at 5 pm", "5", 0), ("on 2024-01-05", "-5", 0), ("on 5/6/2024", "2024", 0), ("on January 5, 2024", "2024", 0),
    ("It is 0x1F", "1", 0), ("call 555-1234", "-1234", 0), ("The ratio is 3 : 4", "4", 0),
    # Arrows in front, and marks that are not shown.
    ("→ 5", "5", 1), ("=> -5", "-5", 1), (r"\boxed{\Rightarrow 5}", "5", 1), ("--> 5", "-5", 0), ("2 → 5", "2", 0),
    ("x => 5", "5", 0), ("\u200e\ufeff-5", "-5", 1),
    # Ranges and lists in words.
    ("It is 5 or 6", "6", 0), ("from 5 to 6", "6", 0), ("5 and 6", "6", 0), ("It is 1/2 or 0.5", "0.5", 1),
    ("It is not 5", "5", 0), ("It is >= 5", "5", 0), ("It is != 5", "5", 0), ("5 to 6", "5 to 6", ERROR),
    # References.
    ("4", "3/4", 0), ("3/4", "3/4", 1), ("10", "2^{10}", ERROR), ("30", "12:30", ERROR), ("3", "10-3", ERROR),
    ("5", "2024-01-05", ERROR), ("2024", "January 5, 2024", ERROR), ("seven", "seven", ERROR),
    ("4", r"\sqrt{16}", ERROR), ("5", "x > 5", ERROR), ("4", "3 or 4", ERROR), ("4", "3, 4", ERROR),
    ("5", "5x", ERROR), ("5", "5!", ERROR), ("5", r"so 3 and \boxed{x}", ERROR), ("5", True, ERROR),
    ("5", [5], ERROR), ("5", "nan", ERROR), ("5", float("inf"), ERROR), ("30", "5 hours 30 minutes", ERROR),
    ("5", 5, 1), ("5", 5.0, 1), ("0.1", 0.1, 1), ("5", "5 apples", 1),
    ("72", "They sold 48 + 24 = <<48+24=72>>72 clips.\n#### 72", 1), ("-5", "#### −5", 1),
    ("5", "The answer is 5.", 1), ("4", r"We have 3 and 5, so \boxed{4}.", 1), ("30", "#### 12:30", ERROR),
    ("1234", "1,234", 1), ("5", "$5", 1), ("1" * 5000, 10**4999, 0), ("5", " ", ERROR),
    # Exact, but for rounded decimals.
    ("1234567", "1234568", 0), ("1234567.0", "1234568", 0), ("1234567.5", "1234567", 0),
    ("1234567.25", "1234567.5", 0), ("1000000001", "1e9", 0), ("5.00", "5", 1), ("007", "7", 1),
    ("0.333333", "1/3", 1), ("0.333", "1/3", 0), ("3.141593", "3.14159265", 1), ("3.14", "3.14159265", 0),
    ("3.14159265", "3.14", 0), ("0.30000000000000004", "0.3", 1), ("30.000000000000004", "30", 1),
    ("1.6e-19", "1.7e-19", 0), ("1e-10", "0", 0), ("7.01", "7", 0),
]  # fmt: skip


def earned(answer: str, reference: Any, **settings: Any) -> float | str:
    try:
        return numeric(rollout(answer, reference=reference), **settings)
    except DataError:
        return ERROR


def test_the_reward_of_answers_and_references_of_all_kinds() -> None:
    assert len(TABLE) > 200
    wrong = [(*case, found) for case in TABLE if (found := earned(case[0], case[1])) != case[2]]
    assert not wrong


def test_an_unreadable_reference_is_an_error_that_shows_the_row_and_what_to_write() -> None:
    with pytest.raises(DataError, match=r"column 'answer' holds '12:30', expected one number such as 72"):
        numeric(rollout("30", reference="12:30"))


def test_tolerances_apply_to_all_numbers_where_they_are_set() -> None:
    assert earned("7.01", "7", rel_tol=0.01) == earned("1010", "1000", rel_tol=0.01) == 1
    assert earned("1011", "1000", rel_tol=0.01) == 0
    assert earned("1001", "1000", abs_tol=1) == earned("0.5", "0", abs_tol=1) == 1
    assert earned("1001", "1000", rel_tol=0.0) == 0
    assert earned("1/3", "0.333", rel_tol=0.01) == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_number_is_read_the_same_in_every_notation(seed: int) -> None:
    draw = random.Random(seed)
    value = Fraction(draw.randint(-(10**7), 10**7), draw.choice([1, 2, 4, 5, 8, 10, 1000]))
    top, bottom, sign = abs(value.numerator), value.denominator, "-" if value < 0 else ""
    decimal = f"{sign}{top // bottom:,}.{(top % bottom) * 1000 // bottom:03}"
    forms = [
        f"{value.numerator}/{bottom}",
        rf"{sign}\frac{{{top}}}{{{bottom}}}",
        rf"\dfrac{{{value.numerator}}}{{{bottom}}}",
        decimal,
        decimal.replace(",", "{,}"),
        decimal.replace(",", r"\,"),
        decimal.replace("-", "−"),
        decimal.replace(",", ""),
        f"{decimal}000",
        f"{decimal}e0",
        rf"{decimal} \times 10^{{0}}",
        f"{sign}${decimal.removeprefix('-')}",
    ]
    if bottom > 1 and top > bottom:
        forms += [
            f"{sign}{top // bottom} {top % bottom}/{bottom}",
            rf"{sign}{top // bottom}\frac{{{top % bottom}}}{{{bottom}}}",
        ]
    for form in forms:
        for text in (form, rf"so $\boxed{{{form}}}$.", f"The answer is {form}.", f"x = {form}", f"**{form}** apples"):
            number = final_number(text)
            assert number is not None, text
            assert number.value == value, text


@pytest.mark.parametrize(
    "text",
    [
        *(
            "1",
            "1 ",
            "123 ",
            "1,234,",
            "(",
            "{",
            r"\boxed{",
            "5 x ",
            "- ",
            "<<",
            "<a",
            r"\text{",
            r"\frac{1}",
            "10^",
            "x=",
        ),
        *(
            "a ",
            "5 and ",
            "½",
            "5/",
            "5/5 ",
            ".",
            "−",
            "Jan 5, ",
            "12:30:",
            "word5 ",
            "5e1",
            "5 a^",
            "5 kg ",
            "x_1",
            "5\n",
        ),
    ],
)
def test_reading_takes_time_in_proportion_to_the_length(text: str) -> None:
    def seconds(count: int) -> float:
        repeated = text * count
        began = time.thread_time()  # other threads of the process belong to other tests
        for read in (final_number, first_number, only_number):
            read(repeated)
        return time.thread_time() - began

    seconds(100)  # fills the caches
    assert seconds(8000) < 32 * seconds(1000) + 0.5
