"""The function behind each built-in formula: its gold before rounding, from inputs in the formula's units."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

__all__ = ["SOLVERS", "Values"]

Values = Mapping[str, float]


def _loan_payment(x: Values) -> float:
    monthly = x["r"] / 12
    return float(x["L"] * monthly / (1 - (1 + monthly) ** (-12 * x["t"])))


def _normal_cdf(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def _black_scholes(x: Values) -> float:
    spread = x["s"] * math.sqrt(x["t"])
    d1 = (math.log(x["S"] / x["X"]) + (x["r"] + x["s"] ** 2 / 2) * x["t"]) / spread
    discount = math.exp(-x["r"] * x["t"])
    return x["S"] * _normal_cdf(d1) - x["X"] * discount * _normal_cdf(d1 - spread)


SOLVERS: Mapping[str, Callable[[Values], float]] = {
    "Simple Interest": lambda x: x["P"] * x["r"] * x["t"],
    "Simple Interest Maturity Value": lambda x: x["P"] * (1 + x["r"] * x["t"]),
    "Compound Amount": lambda x: x["P"] * (1 + x["r"] / x["m"]) ** (x["m"] * x["t"]),
    "Future Value of a Lump Sum": lambda x: x["PV"] * (1 + x["i"]) ** x["n"],
    "Present Value of a Lump Sum": lambda x: x["FV"] / (1 + x["i"]) ** x["n"],
    "Present Value of an Annuity": lambda x: x["C"] * (1 - (1 + x["i"]) ** -x["n"]) / x["i"],
    "Future Value of an Annuity": lambda x: x["C"] * ((1 + x["i"]) ** x["n"] - 1) / x["i"],
    "Perpetuity Value": lambda x: x["C"] / x["i"],
    "Growing Perpetuity Value": lambda x: x["C"] / (x["i"] - x["g"]),
    "Effective Annual Rate": lambda x: ((1 + x["r"] / x["m"]) ** x["m"] - 1) * 100,
    "Annual Percentage Rate": lambda x: (x["F"] + x["I"]) / x["P"] * 365 / x["D"] * 100,
    "Level Loan Payment": _loan_payment,
    "Loan-to-Value Ratio": lambda x: x["L"] / x["V"] * 100,
    "Debt-to-Income Ratio": lambda x: x["D"] / x["Y"] * 100,
    "Real Rate of Return": lambda x: ((1 + x["n"]) / (1 + x["p"]) - 1) * 100,
    "Two-Year Net Present Value": lambda x: x["C1"] / (1 + x["k"]) + x["C2"] / (1 + x["k"]) ** 2 - x["C0"],
    "Payback Period": lambda x: x["C0"] / x["C"],
    "Profitability Index": lambda x: x["V"] / x["C0"],
    "Straight-Line Depreciation": lambda x: (x["C"] - x["S"]) / x["n"],
    "Annual Growth Rate (CAGR)": lambda x: ((x["E"] / x["B"]) ** (1 / x["n"]) - 1) * 100,
    "Gross Margin": lambda x: (x["R"] - x["C"]) / x["R"] * 100,
    "Operating Margin": lambda x: x["E"] / x["R"] * 100,
    "Net Profit Margin": lambda x: x["N"] / x["R"] * 100,
    "Return on Assets": lambda x: x["N"] / x["A"] * 100,
    "Return on Equity": lambda x: x["N"] / x["Q"] * 100,
    "Return on Capital Employed": lambda x: x["E"] / (x["A"] - x["L"]) * 100,
    "Return on Investment": lambda x: (x["G"] - x["C"]) / x["C"],
    "Current Ratio": lambda x: x["A"] / x["L"],
    "Quick Ratio": lambda x: (x["A"] - x["S"]) / x["L"],
    "Cash Ratio": lambda x: (x["K"] + x["M"]) / x["L"],
    "Working Capital": lambda x: x["A"] - x["L"],
    "Debt-to-Equity Ratio": lambda x: x["D"] / x["Q"],
    "Equity Multiplier": lambda x: x["A"] / x["Q"],
    "Interest Cover": lambda x: x["E"] / x["I"],
    "Debt Service Cover": lambda x: x["N"] / (x["P"] + x["I"]),
    "Inventory Turnover": lambda x: x["C"] / ((x["B"] + x["E"]) / 2),
    "Days Sales Outstanding": lambda x: x["A"] / x["S"] * x["D"],
    "Days Payable Outstanding": lambda x: x["P"] / x["C"] * x["D"],
    "Receivables Turnover": lambda x: x["S"] / x["R"],
    "Asset Turnover": lambda x: x["R"] / x["A"],
    "Operating Cash Flow": lambda x: x["N"] + x["D"] - x["W"],
    "Free Cash Flow": lambda x: x["O"] - x["X"],
    "Break-Even Quantity": lambda x: x["F"] / (x["p"] - x["c"]),
    "Degree of Operating Leverage": lambda x: (x["S"] - x["V"]) / (x["S"] - x["V"] - x["F"]),
    "Altman Working-Capital Term": lambda x: 1.2 * x["W"] / x["A"],
    "Capital Asset Pricing Model": lambda x: (x["rf"] + x["b"] * (x["rm"] - x["rf"])) * 100,
    "Sharpe Ratio": lambda x: (x["rp"] - x["rf"]) / x["s"],
    "Sortino Ratio": lambda x: (x["rp"] - x["t"]) / x["d"],
    "Treynor Ratio": lambda x: (x["rp"] - x["rf"]) / x["b"] * 100,
    "Jensen's Alpha": lambda x: (x["rp"] - (x["rf"] + x["b"] * (x["rm"] - x["rf"]))) * 100,
    "Beta from Covariance": lambda x: x["c"] / x["w"],
    "Information Ratio": lambda x: (x["rp"] - x["rb"]) / x["te"],
    "Two-Asset Portfolio Return": lambda x: (x["w"] * x["ra"] + (1 - x["w"]) * x["rb"]) * 100,
    "Earnings per Share": lambda x: (x["N"] - x["D"]) / x["S"],
    "Price-Earnings Ratio": lambda x: x["P"] / x["E"],
    "Price-to-Book Ratio": lambda x: x["P"] / x["B"],
    "Dividend Yield": lambda x: x["D"] / x["P"] * 100,
    "Dividend Payout Ratio": lambda x: x["D"] / x["E"],
    "Sustainable Growth Rate": lambda x: x["ROE"] * (1 - x["d"]) * 100,
    "Market Capitalisation": lambda x: x["S"] * x["P"],
    "Enterprise Value": lambda x: x["M"] + x["D"] - x["K"],
    "EV-to-EBITDA Multiple": lambda x: x["EV"] / x["X"],
    "Gordon Growth Price": lambda x: x["D"] / (x["k"] - x["g"]),
    "Cost of Equity from Dividends": lambda x: (x["D"] / x["P"] + x["g"]) * 100,
    "After-Tax Cost of Capital": lambda x: (x["q"] * x["ke"] + (1 - x["q"]) * x["kd"] * (1 - x["t"])) * 100,
    "Levered Firm Value": lambda x: x["VU"] + x["t"] * x["D"],
    "Black-Scholes Call Price": _black_scholes,
    "Put-Call Parity for the Put": lambda x: x["C"] - x["S"] + x["X"] / (1 + x["r"]) ** x["t"],
    "Current Yield of a Bond": lambda x: x["c"] * x["F"] / x["P"] * 100,
    "Gross Domestic Product": lambda x: x["C"] + x["I"] + x["G"] + x["X"] - x["M"],
    "Balance of Trade": lambda x: x["X"] - x["M"],
    "Inflation Rate": lambda x: (x["K1"] - x["K0"]) / x["K0"] * 100,
    "Unemployment Rate": lambda x: x["N"] / x["L"] * 100,
    "Real Output from the Deflator": lambda x: x["Y"] / x["d"] * 100,
    "Debt-to-GDP Ratio": lambda x: x["D"] / x["Y"] * 100,
    "Velocity of Money": lambda x: x["P"] * x["Q"] / x["M"],
    "Money Multiplier": lambda x: (1 + x["c"]) / (x["c"] + x["q"]),
    "Interest Rate Parity Forward": lambda x: x["S"] * (1 + x["id"]) / (1 + x["if"]),
    "Purchasing Power Parity": lambda x: x["S0"] * x["P1"] / x["P0"],
}
