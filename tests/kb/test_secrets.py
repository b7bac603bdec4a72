"""Keys and tokens in names and texts: found where they are real, and not in what is written about them."""

import base64
import random
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.kb import KnowledgeBase
from localrag.kb.walk import found_secret, is_secret_name
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.readers.pdf_files import pdf_of

RNG = random.Random(21)
LETTERS = string.ascii_letters + string.digits


def made(num, alphabet=LETTERS):
    """Random characters: no token of these tests opens anything."""
    return "".join(RNG.choices(alphabet, k=num))


def key(kind="PRIVATE KEY", *, newline="\n", header=""):
    body = base64.b64encode(RNG.randbytes(600)).decode()
    lines = [body[at : at + 64] for at in range(0, len(body), 64)]
    return newline.join([f"-----BEGIN {kind}-----", *([header, ""] if header else []), *lines, f"-----END {kind}-----", ""])


NAMES = """
    prod.env .env .env.local credentials credentials.json Credentials.CSV secrets.yaml secrets.yml secrets.toml secret.json
    terraform.tfstate terraform.tfstate.backup prod.tfvars prod.auto.tfvars.json x.htpasswd .htpasswd .npmrc .pypirc .netrc _netrc
    id_rsa id_ed25519 app.p12 app.pfx app.jks release.keystore AuthKey.p8 kubeconfig prod.kubeconfig service-account.json
    service_account_prod.json client_secret_12.json passwords.txt passwords.csv rootkey.csv ann_accessKeys.csv vault.kdbx
    server.key server.pem .pgpass .git-credentials shadow secrets
    secrets.prod.yaml credentials.production.json credentials.json.bak prod.env.bak app-credentials.json google-credentials.json
    aws_credentials docker-secrets.yml env.prod secrets.enc.yaml env.production.old secrets.yaml.gpg secrets.bak .env.bak id_rsa.old
    server.key.enc my_passwords.ini secrets.local passwords.txt~ Docker-Secrets.YML.BAK
    """.split()  # noqa: SIM905  # a word list reads better as words
OTHERS = """
    prod.env.example .env.sample env.md sample.env credentials.md credentials.example.json secrets.md secrets.py test_secrets.py
    secret-garden.md terraform.tf environment.txt keyboard.md monkey.txt key.md passwords.md password-policy.docx passwords.html
    tokens.md npmrc.md service-accounts.md my-secrets.md secrets-of-nature.txt shadow.md htpasswd.md credentials-template.yaml
    environment.md secret-santa.txt secret-santa.csv credentials-howto.md app-credentials.pdf env.md env.txt env.py env.prod.md
    notes.bak letter.old secretary.json forgot-password.json my-credentials.md.bak secrets.example.yaml.bak secret-garden
    """.split()  # noqa: SIM905  # a word list reads better as words


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_keys_have(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", OTHERS)
def test_a_name_of_what_is_written_about_keys(name):
    assert not is_secret_name(name)


TEXTS = {
    "a private key": [
        key(),
        key("RSA PRIVATE KEY"),
        key("EC PRIVATE KEY", header="Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0123456789ABCDEF0123456789ABCDEF"),
        key("OPENSSH PRIVATE KEY"),
        key("ENCRYPTED PRIVATE KEY", newline="\r\n"),
        key("PGP PRIVATE KEY BLOCK", header="Version: GnuPG v2\nComment: mine"),
        '{"type": "service_account", "private_key": "' + key(newline="\\n") + '"}',
        "> " + key(newline="\n> "),
        "    " + key(newline="\n    "),
        'KEY = ("' + key(newline='\\n"\n       "') + '")',
        key(newline=" "),
        "-----BEGIN PRIVATE KEY-----\n" + base64.b64encode(RNG.randbytes(48)).decode() + "\n-----END PRIVATE KEY-----",
        "PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\nPrivate-Lines: 14\n" + base64.b64encode(RNG.randbytes(96)).decode(),
    ],
    "an AWS secret key": [f"aws_secret_access_key = {made(40)}", f'"SecretAccessKey": "{made(40, LETTERS + "/+")}"'],
    "a GitHub token": [f"ghp_{made(36)}", f"token: ghs_{made(36)}", f"github_pat_{made(82, LETTERS + '_')}"],
    "a GitLab token": [f"glpat-{made(20)}"],
    "a Slack token": [f"xoxb-123456789012-123456789012-{made(24)}"],
    "a Slack webhook": [f"https://hooks.slack.com/services/T{made(9)}/B{made(9)}/{made(24)}"],
    "an OpenAI key": [f"sk-{made(20)}T3BlbkFJ{made(20)}", f"OPENAI_API_KEY=sk-proj-{made(60, LETTERS + '-_')}T3BlbkFJ{made(60)}"],
    "an Anthropic key": [f"sk-ant-api03-{made(93)}AA"],
    "a Google API key": [f"key=AIza{made(35)}"],
    "a Google client secret": [f"GOCSPX-{made(28)}"],
    "a Stripe key": [f"sk_live_{made(24)}", f"rk_live_{made(99)}"],
    "a Hugging Face token": [f"hf_{made(34, string.ascii_letters)}"],
    "an npm token": [f"//registry/:_authToken=npm_{made(36)}"],
    "a PyPI token": [f"pypi-AgEIcHlwaS5vcmc{made(150)}"],
    "a SendGrid key": [f"SG.{made(22)}.{made(43)}"],
    "a DigitalOcean token": [f"dop_v1_{made(64, '0123456789abcdef')}"],
    "an Azure storage key": [f"DefaultEndpointsProtocol=https;AccountName=x;AccountKey={made(86)}==;"],
    "an age key": [f"AGE-SECRET-KEY-1{made(58, 'QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L')}"],
}
ABOUT = [
    "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----",
    "A file begins with `-----BEGIN RSA PRIVATE KEY-----` and then lines of base64 follow. " * 3,
    "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC...\n-----END PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\n" + "x" * 64 + "\n-----END PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\n<your key goes here, in base64, sixty-four characters to each of the lines>\n-----END PRIVATE KEY-----",
    key("PUBLIC KEY"),
    key("CERTIFICATE"),
    f"ssh-ed25519 {made(68)} ann@host",
    "ghp_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    "ghp_" + "0123456789abcdefghij0123456789abcdef",
    "tokens begin with ghp_ or xoxb- or sk-, for example sk-...",
    "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "aws_secret_access_key = YOUR_SECRET_KEY_GOES_HERE",
    "AKIAIOSFODNN7EXAMPLE",
    f"sha256:{made(64, '0123456789abcdef')}",
    f"data:image/png;base64,{made(4000, LETTERS + '/+')}",
    "password = hunter2",
    "sk-learn-contrib is a collection; see sk-dist and sk-video-processing-tools-for-everyone",
]


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in TEXTS.items() for text in texts])
def test_a_key_in_a_text(kind, text):
    assert found_secret(text) == found_secret(f"# Notes\n\nsome words\n{text}\nand more\n") == kind


@pytest.mark.parametrize("text", ABOUT)
def test_what_is_written_about_keys_is_none(text):
    assert found_secret(text) == ""


@given(st.text())
def test_any_text_is_looked_at(text):
    assert found_secret(text) == ""


@pytest.mark.parametrize(
    "unit",
    ["-----BEGIN PRIVATE KEY-----\n", "sk-", "sk-T3BlbkFJ", "ghp_", "aws_secret_key" + " " * 5 + "=", "xoxb-123456-", "A: b\n",
     "PuTTY-User-Key-File\nPrivate-Lines: 1\n"],
)  # fmt: skip
def test_the_time_stays_in_proportion_to_the_text(unit):
    def seconds(num):
        started = time.process_time()
        found_secret(unit * (num // len(unit)))
        return time.process_time() - started

    assert min(seconds(2_000_000) for _ in range(2)) < 40 * min(seconds(200_000) for _ in range(3)) + 1


def sources(kb):
    return {source for source, _ in kb.sources()}


def test_a_file_that_holds_a_key_is_named_and_read_only_if_asked_for(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "plain.md").write_text("# Plain\n\nNothing is here.\n")
    (folder / "about.md").write_text(f"# Keys\n\n{ABOUT[0]}\n")
    (folder / "notes.txt").write_text(f"my key\n\n{key()}\n")
    (folder / "mail.eml").write_text(f"Subject: s\nContent-Type: text/plain\n\n> {key(newline=chr(10) + '> ')}\n")
    (folder / "print.pdf").write_bytes(pdf_of([["A key:", *key().split("\n")]]))
    (folder / "run.py").write_text(f'TOKEN = "ghp_{made(36)}"\n')
    (folder / "data.json").write_text('{"k": "' + f"xoxb-123456789012-123456789012-{made(24)}" + '"}')
    secret = {"notes/notes.txt", "notes/mail.eml", "notes/print.pdf", "notes/run.py", "notes/data.json"}
    plain = {"notes/plain.md", "notes/about.md"}
    embedder = HashEmbedder(max_tokens=256)
    with KnowledgeBase.open(tmp_path / "kb", "notes", create=True) as kb:
        for _ in range(2):
            result = kb.ingest([folder], embedder)
            assert {skip.source for skip in result.skipped} == secret
            assert {skip.reason for skip in result.skipped} == {
                f"holds {kind}; --hidden reads it" for kind in ("a private key", "a GitHub token", "a Slack token")
            }
            assert sources(kb) == plain
        assert kb.ingest([folder], embedder, hidden=True).added == 5
        assert sources(kb) == plain | secret
        plan = kb.plan([folder])
        assert (set(plan.removed), {skip.source for skip in plan.skipped}) == (secret, secret)
        assert kb.ingest([folder], embedder, hidden=True).unchanged == 7
        result = kb.ingest([folder], embedder)
        assert (result.removed, result.unchanged, len(result.skipped)) == (5, 2, 5)
        assert sources(kb) == plain
        (folder / "plain.md").write_text(f"# Plain\n\n{key()}\n")
        assert kb.ingest([folder], embedder).removed == 1
        assert sources(kb) == {"notes/about.md"}


def test_a_key_in_a_renamed_file_is_not_let_in_again(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.txt").write_text(key())
    (folder / "b.txt").write_text("words")
    embedder = HashEmbedder(max_tokens=256)
    with KnowledgeBase.open(tmp_path / "kb", "notes", create=True) as kb:
        kb.ingest([folder], embedder, hidden=True)
        (folder / "a.txt").rename(folder / "c.txt")
        result = kb.ingest([folder], embedder)
        assert (result.renamed, result.removed, sources(kb)) == (0, 1, {"notes/b.txt"})


def test_a_file_cannot_say_of_itself_that_it_holds_a_key(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.md").write_text("---\ncontains_secret: a private key\nincomplete: all of it\nauthor: Ann\n---\n# A\n\nwords\n")
    embedder = HashEmbedder(max_tokens=256)
    with KnowledgeBase.open(tmp_path / "kb", "notes", create=True) as kb:
        for _ in range(2):
            result = kb.ingest([folder], embedder)
            assert (result.skipped, result.partial) == ((), ())
        assert kb.fields() == {"notes/a.md": {"author": ["Ann"]}}
