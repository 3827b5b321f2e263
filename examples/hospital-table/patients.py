"""Write patients.csv: 442 real diabetes patients, as a hospital would export them."""

import csv
from pathlib import Path

from sklearn.datasets import load_diabetes

NAMES = {
    "age": "age",
    "sex": "sex",
    "bmi": "bmi",
    "bp": "blood_pressure",
    "s1": "cholesterol",
    "s2": "ldl",
    "s3": "hdl",
    "s4": "cholesterol_to_hdl",
    "s5": "log_triglycerides",
    "s6": "glucose",
}


def main(path: Path = Path("patients.csv")) -> None:
    table = load_diabetes(scaled=False, as_frame=True)
    progression = table.target > table.target.median()
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["patient", *NAMES.values(), "progression"])
        for number, row in table.data.iterrows():
            values = [f"{row[name]:g}" for name in NAMES]
            values[1] = f"sex {row['sex']:g}"  # the package does not say which is which
            writer.writerow([f"P{number:04d}", *values, "fast" if progression[number] else "slow"])
    print(f"wrote {path}: {len(table.data)} patients")


if __name__ == "__main__":
    main()
